"""Count observations in histograms cheaply enough for every token.

An observation costs a bisection and two additions. The metrics library's own histogram takes
locks and walks its buckets, which takes several times as long (`benchmarks/metrics.py`). One
thread observes; another may read meanwhile.
"""

from bisect import bisect_left
from collections.abc import Sequence


class FastHistogram:
    """Distribution of one quantity: counts by bucket, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Set the upper bounds of the buckets, in rising order; one more bucket is open."""
        self.bounds = tuple(bounds)
        #: One count per bound, and one for values above the last. Not cumulative.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a value equal to a bound counts below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def n(self) -> int:
        """Number of observed values."""
        return sum(self.counts)


def time_buckets(least: float, most: float) -> tuple[float, ...]:
    """Return bounds for times: 1, 2, 5, 10, … between about `least` and `most`."""
    return _one_two_five(least, most)


def token_buckets(most: int) -> tuple[float, ...]:
    """Return bounds for lengths in tokens."""
    return _one_two_five(1, most)


def _one_two_five(least: float, most: float) -> tuple[float, ...]:
    steps = [float(f"{digit}e{power}") for power in range(-6, 10) for digit in (1, 2, 5)]
    return tuple(step for step in steps if least <= step <= most)
