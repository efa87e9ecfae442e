"""Keep recent placement decisions with the estimates that explain them."""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.placement.estimates import Placement
from halfmoon_scheduling.prediction.error_quantiles import ErrorBound
from halfmoon_scheduling.requests.request_state import RequestState

DecisionOutcome = Literal["placed", "deferred", "refused", "refused_late"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about one request, and the estimates behind it."""

    request_id: RequestId
    attempt: int
    at_s: float
    #: The choice, with every candidate's estimates.
    placement: Placement
    #: "refused_late": after its prefill, which was wasted.
    outcome: DecisionOutcome = "placed"
    #: Predicted times over their limits, as admission computed them.
    prefill_load: float = 0.0
    decode_load: float = 0.0
    #: Why it was not placed.
    reason: str = ""
    #: What admission compared with the limits, and by which errors; None: the mean predictions,
    #: or nothing.
    ttft_bound: ErrorBound | None = None
    tbt_bound: ErrorBound | None = None


class DecisionLog:
    """Hold the most recent decisions."""

    def __init__(self, n_kept: int) -> None:
        """Create an empty log of at most `n_kept` decisions."""
        #: The newest last.
        self.decisions: deque[Decision] = deque(maxlen=n_kept)

    def record(
        self,
        state: RequestState,
        placement: Placement,
        verdict: AdmissionVerdict,
        now: float,
        outcome: DecisionOutcome,
    ) -> None:
        """Append a decision."""
        decision = Decision(
            state.request_id,
            state.request.attempt,
            now,
            placement,
            outcome,
            verdict.prefill_load,
            verdict.decode_load,
            verdict.reason,
            verdict.ttft,
            verdict.tbt,
        )
        self.decisions.append(decision)
