"""Metrics that are read when they are looked at, not kept up to date by whoever changes them.

A service keeps plain numbers and distributions, and says under which names they are to be seen.
What a name says by Prometheus' conventions is all there is to declare: one in ``_total`` is a
counter, a distribution is a histogram, the rest are gauges. A label's values come and go with
what is read, so those of a worker that left are gone too.
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
    """Values by those of some labels."""

    labels: tuple[str, ...]
    #: By tuples of one string for each label.
    values: Mapping[Any, MetricValue]


#: Metric name → its help text, and its value or values.
MetricSnapshot = Mapping[str, tuple[str, MetricValue | LabelledValues]]

_TOTAL = "_total"


def by_label(label: str, values: Mapping[Any, MetricValue]) -> LabelledValues:
    """Values by those of one label."""
    return LabelledValues((label,), {(each,): value for each, value in values.items()})


def expose_metrics(
    read: Callable[[], MetricSnapshot], *, registry: CollectorRegistry = REGISTRY
) -> Callable[[], None]:
    """Show what `read` returns whenever the registry is scraped.

    Args:
        read: called from the scraping thread; quick, and safe to call at any moment.
        registry: where.

    Returns:
        What to call to show it no more.

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
        """The same: the registry asks once, to find two metrics of one name."""
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
    """Cumulative counts by upper bound, from one look at the counts."""
    bounds = [*(str(bound) for bound in distribution.bounds), "+Inf"]
    counts = (float(n) for n in accumulate(list(distribution.counts)))
    return list(zip(bounds, counts, strict=True))
