"""What the core counts, as Prometheus sees it: prediction errors and refusals.

The core keeps plain numbers, since it knows no metrics library; they are read when they are
scraped.
"""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from halfmoon_scheduling.accuracy import BOUNDS
from halfmoon_scheduling.conductor import Conductor


class PredictionMetrics(Collector):
    """Histograms of observed over predicted times, and refusals by what was lacking."""

    def __init__(self, core: Conductor, registry: CollectorRegistry) -> None:
        self._core = core
        registry.register(self)

    def collect(self) -> Iterable[HistogramMetricFamily | CounterMetricFamily]:
        """Read the core's counters."""
        errors = HistogramMetricFamily(
            "halfmoon_prediction_error_ratio",
            "Observed over predicted seconds of each request: 1 is right, 2 took twice as long.",
            labels=["quantity"],
        )
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        for quantity, histogram in self._core.accuracy.histograms.items():
            counts = [float(n) for n in accumulate(histogram.counts)]
            errors.add_metric(
                [quantity], list(zip(bounds, counts, strict=True)), histogram.ratio_sum
            )
        yield errors
        refusals = CounterMetricFamily(
            "halfmoon_refusals", "Requests refused, by what was lacking.", labels=["lacking"]
        )
        for lacking, n in dict(self._core.refusals).items():
            refusals.add_metric([lacking], n)
        yield refusals
