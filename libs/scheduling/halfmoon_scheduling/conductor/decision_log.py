"""Keep recent placement decisions with the estimates that explain them.

A decision has the rows of its best candidates. In a cluster of servers it may also name each one
without room. So the log is bounded in bytes too. Sizes are estimated from counts alone, and are
the same in each run.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.admission.admission_policy import AdmissionVerdict
from halfmoon_scheduling.placement.estimates import Placement
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate
from halfmoon_scheduling.prediction.error_quantiles import ErrorBound
from halfmoon_scheduling.requests.request_state import RequestState

#: Bytes of a decision without rows, at the most.
_DECISION_BYTES = 2048
#: Bytes of a row, at the most, and of a stage in the row of a group. CPython 3.12 takes 200 for a
#: prefill worker, and 272 for a decode worker that prefills.
_ROW_BYTES, _STAGE_BYTES = 320, 40
#: Bytes of a worker in `Placement.without_room`, and of a character of a reason.
_ENTRY_BYTES, _CHARACTER_BYTES = 64, 4

DecisionOutcome = Literal["placed", "deferred", "refused", "refused_late"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about one request, and the estimates behind it."""

    request_id: RequestId
    attempt: int
    at_s: float
    #: The choice, with the best candidates' estimates.
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
    """Hold the most recent decisions, bounded in number and in bytes."""

    def __init__(self, n_kept: int, kept_bytes: int) -> None:
        """Create an empty log of at most `n_kept` decisions and `kept_bytes` bytes."""
        self._n_kept = n_kept
        self._kept_bytes = kept_bytes
        #: The newest last. A decision that is larger than the whole log is not kept.
        self.decisions: deque[Decision] = deque()
        #: Estimated bytes of each of `decisions`, and their sum.
        self._sizes: deque[int] = deque()
        self.n_bytes = 0

    def record(
        self,
        state: RequestState,
        placement: Placement,
        verdict: AdmissionVerdict,
        now: float,
        outcome: DecisionOutcome,
    ) -> None:
        """Append a decision; drop the oldest ones that are over the bounds."""
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
        if (size := estimated_bytes(decision)) > self._kept_bytes:
            return
        self.decisions.append(decision)
        self._sizes.append(size)
        self.n_bytes += size
        while len(self.decisions) > self._n_kept or self.n_bytes > self._kept_bytes:
            self.decisions.popleft()
            self.n_bytes -= self._sizes.popleft()

    def check(self) -> None:
        """Check the bounds and the sizes."""
        assert [estimated_bytes(decision) for decision in self.decisions] == list(self._sizes)
        assert self.n_bytes == sum(self._sizes) <= self._kept_bytes
        assert len(self.decisions) <= self._n_kept


def estimated_bytes(decision: Decision) -> int:
    """Estimate the memory of a decision with its rows."""
    placement = decision.placement
    return (
        _DECISION_BYTES
        + _ROW_BYTES * len(placement.estimates)
        + _STAGE_BYTES
        * sum(len(row.stage_s) for row in placement.estimates if isinstance(row, GroupEstimate))
        + _ENTRY_BYTES * len(placement.without_room)
        + _CHARACTER_BYTES * len(decision.reason)
    )
