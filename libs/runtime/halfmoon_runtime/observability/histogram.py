"""Histograms cheap enough for every token: a bisection and two additions per observation.

The metrics library's own takes locks and walks its buckets, several times as long
(`benchmarks/metrics.py` says how long). One of these belongs to one thread that observes;
another may read it meanwhile.
"""

from bisect import bisect_left
from collections.abc import Sequence


class FastHistogram:
    """What was observed of one quantity."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the buckets' upper ones, rising; one more bucket is open."""
        self.bounds = tuple(bounds)
        #: One per bound, and one for what is above the last. Not cumulative.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more; what equals a bound counts below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def n(self) -> int:
        """How many were observed."""
        return sum(self.counts)


def time_buckets(least: float, most: float) -> tuple[float, ...]:
    """Bounds for times: 1, 2, 5, 10, … from about the least to about the most."""
    return _one_two_five(least, most)


def token_buckets(most: int) -> tuple[float, ...]:
    """Bounds for lengths in tokens."""
    return _one_two_five(1, most)


def _one_two_five(least: float, most: float) -> tuple[float, ...]:
    steps = [float(f"{digit}e{power}") for power in range(-6, 10) for digit in (1, 2, 5)]
    return tuple(step for step in steps if least <= step <= most)
