"""Compare predicted with observed times, in histograms of the cost model's errors.

An error is observed over predicted seconds: 1 is right, 2 took twice as long as predicted.
Histograms show more than means: a mean of 1 may be half of 0.1 and half of 1.9.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, get_args

from halfmoon_protocol.messages import PrefillDone
from halfmoon_scheduling.placement.estimates import Estimate
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate

#: Upper bounds of the buckets but the last, which is open: factors of 1.25 around 1, then wide.
BUCKET_BOUNDS = (0.1, 0.2, 0.4, 0.64, 0.8, 1.0, 1.25, 1.5625, 2.5, 5.0, 10.0)

#: Time to first token, time between tokens, and the parts of the time to first token.
Quantity = Literal["ttft", "tbt", "queue", "prefill", "transfer"]


@dataclass(slots=True)
class ErrorHistogram:
    """Ratios of observed to predicted times."""

    #: One per bound, and one for ratios above the last. Not cumulative.
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_BOUNDS) + 1))
    #: Sums over all observations: ratios, and seconds of both.
    ratio_sum: float = 0.0
    predicted_s: float = 0.0
    observed_s: float = 0.0

    @property
    def n(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, predicted_s: float, observed_s: float) -> None:
        """Count one observation; a prediction of 0 is ignored."""
        if predicted_s <= 0:
            return
        ratio = observed_s / predicted_s
        self.counts[bisect_left(BUCKET_BOUNDS, ratio)] += 1
        self.ratio_sum += ratio
        self.predicted_s += predicted_s
        self.observed_s += observed_s


class PredictionErrors:
    """Hold an error histogram for each predicted quantity."""

    def __init__(self) -> None:
        self.histograms: dict[Quantity, ErrorHistogram] = {
            quantity: ErrorHistogram() for quantity in get_args(Quantity)
        }

    def observe(self, quantity: Quantity, predicted_s: float, observed_s: float) -> None:
        """Count one prediction with the time observed."""
        self.histograms[quantity].observe(predicted_s, observed_s)

    def on_prefill_done(self, predicted: Estimate, done: PrefillDone) -> None:
        """Count the parts of a prefill's time, which its worker reports."""
        if isinstance(predicted, GroupEstimate | LocalPrefillEstimate):
            return  # their workers report no parts
        self.observe("queue", predicted.queue_s, done.queue_s)
        self.observe("prefill", predicted.prefill_s, done.compute_s)
        if done.fetched_bytes:
            self.observe("transfer", predicted.transfer_s, done.fetch_s)
