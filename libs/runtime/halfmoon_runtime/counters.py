"""Counters cheap enough for every token: one addition, where the metrics library's take a lock.

For one thread that counts; another one may scrape meanwhile.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class Counter(Collector):
    """A metric of one number that only grows."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        """Nothing counted yet.

        Args:
            name: the metric's, without ``_total``.
            text: what it says.
            registry: where it shows.
        """
        self.name = name
        self.text = text
        self.n = 0
        registry.register(self)

    def inc(self, n: int = 1) -> None:
        """So many more."""
        self.n += n

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What was counted so far."""
        yield CounterMetricFamily(self.name, self.text, value=float(self.n))

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Its name, for the registry to find a second one of that name."""
        yield CounterMetricFamily(self.name, self.text)
