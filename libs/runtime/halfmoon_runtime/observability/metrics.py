"""Expose plain numbers of a service as Prometheus metrics, read when they are scraped.

A service keeps numbers and distributions, and gives the names under which they are exposed. The
name declares the type by Prometheus' conventions: a name in ``_total`` is a counter, a
distribution is a histogram, the others are gauges. The values of a label are read anew each time,
so that those of a worker that left disappear.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from halfmoon_runtime.observability.histogram import FastHistogram

MetricValue = float | FastHistogram


class LabelledValues(NamedTuple):
    """Values of one metric, by its labels."""

    labels: tuple[str, ...]
    #: Keys are tuples with one string for each label.
    values: Mapping[Any, MetricValue]


#: Metric name → help text, and value or labelled values.
MetricSnapshot = Mapping[str, tuple[str, MetricValue | LabelledValues]]

_TOTAL = "_total"


def by_label(label: str, values: Mapping[Any, MetricValue]) -> LabelledValues:
    """Return values of a metric by its only label."""
    return LabelledValues((label,), {(each,): value for each, value in values.items()})


def expose_metrics(
    read: Callable[[], MetricSnapshot], *, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Expose what `read` returns whenever the registry is scraped.

    Args:
        read: returns the metrics; called from the scraping thread, at any moment. It must be quick.
        registry: registry to add them to.

    Returns:
        A function that ends the exposure.

    Raises:
        ValueError: two metrics have one name.
    """
    collector = _ReadOnScrape(read)
    registry.register(collector)
    return lambda: registry.unregister(collector)


_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


class _ReadOnScrape(Collector):
    def __init__(self, read: Callable[[], MetricSnapshot]) -> None:
        self._read = read

    def collect(self) -> Iterable[_Family]:
        for name, (text, value) in self._read().items():
            labelled = (
                value if isinstance(value, LabelledValues) else LabelledValues((), {(): value})
            )
            yield _family(name, text, labelled)

    def describe(self) -> Iterable[_Family]:
        """Return the metrics: the registry calls this once, to find two metrics of one name."""
        return self.collect()


def _family(name: str, text: str, labelled: LabelledValues) -> _Family:
    labels, values = labelled
    if any(isinstance(value, FastHistogram) for value in values.values()):
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            assert isinstance(value, FastHistogram), f"{name} is a histogram and a number"
            histogram.add_metric(key, _buckets(value), value.sum)
        return histogram
    family: GaugeMetricFamily | CounterMetricFamily = (
        CounterMetricFamily(name.removesuffix(_TOTAL), text, labels=labels)
        if name.endswith(_TOTAL)
        else GaugeMetricFamily(name, text, labels=labels)
    )
    for key, value in values.items():
        assert not isinstance(value, FastHistogram)
        family.add_metric(key, value)
    return family


def _buckets(distribution: FastHistogram) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, from one copy of the counts."""
    bounds = [*(str(bound) for bound in distribution.bounds), "+Inf"]
    counts = (float(n) for n in accumulate(list(distribution.counts)))
    return list(zip(bounds, counts, strict=True))
