"""Histograms cheap enough for every token: a bisection and two additions each.

The metrics library's own takes a lock and walks its buckets, several times as long
(`benchmarks/metrics.py` says how long). These are for one thread that observes; another one
may scrape them meanwhile, and then sees each observation wholly or not yet in the counts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Distribution:
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


class Histogram(Collector):
    """A metric of one distribution, or of one for each value of a label."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        *,
        label: str = "",
        values: Iterable[str] = ("",),
    ) -> None:
        """Nothing observed yet; all of it is shown from the start.

        Args:
            name: the metric's, with its unit.
            text: what it says.
            bounds: see `Distribution`.
            registry: where it shows.
            label: the label's name; empty: there is none.
            values: all that the label can be.
        """
        self.name = name
        self.text = text
        self.label = label
        self.distributions = {value: Distribution(bounds) for value in values}
        registry.register(self)

    def observe(self, value: float, of: str = "") -> None:
        """One more, of this value of the label."""
        self.distributions[of].observe(value)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What was observed so far."""
        labels = [self.label] if self.label else []
        family = HistogramMetricFamily(self.name, self.text, labels=labels)
        for value, each in self.distributions.items():
            add(family, [value] if self.label else [], each)
        yield family

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """Its name, for the registry to find a second one of that name."""
        yield HistogramMetricFamily(self.name, self.text)


def add(family: HistogramMetricFamily, labels: Sequence[str], each: Distribution) -> None:
    """Put a distribution into a family, under these labels' values."""
    counts = [float(n) for n in accumulate(list(each.counts))]
    bounds = [*(str(bound) for bound in each.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, counts, strict=True)), each.sum)
