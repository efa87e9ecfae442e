"""Gauges that are read when they are looked at, not kept up to date by whoever changes them."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

#: Metric name → its help text and its value, or its values by one label's value.
Readings = Mapping[str, tuple[str, float | Mapping[str, float]]]


class _ReadOnScrape(Collector):
    def __init__(self, read: Callable[[], Readings], label: str) -> None:
        self._read = read
        self._label = label

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, (text, value) in self._read().items():
            if isinstance(value, Mapping):
                family = GaugeMetricFamily(name, text, labels=[self._label])
                for key, number in value.items():
                    family.add_metric([key], number)
            else:
                family = GaugeMetricFamily(name, text, value=value)
            yield family


def expose(
    read: Callable[[], Readings],
    *,
    label: str = "kind",
    registry: CollectorRegistry = REGISTRY,
) -> Callable[[], None]:
    """Show what `read` returns whenever the registry is scraped.

    Args:
        read: called from the scraping thread; quick, and safe to call at any moment.
        label: the label's name for values that are mappings.
        registry: where.

    Returns:
        What to call to show it no more.
    """
    collector = _ReadOnScrape(read, label)
    registry.register(collector)
    return lambda: registry.unregister(collector)
