"""Keep a session on the prefill worker that served it last, where that costs little.

A session is a chain of prompts in which each one begins with the one before it, such as the turns
of a conversation. No field of a request names it, and none is needed. Block hashes are chained, so
the hash of a prompt's last full block identifies the whole prompt up to there. The mode remembers
that hash with the worker; a later prompt of the session contains it.

Keeping to a worker saves transfers between kvstores and second copies of a session's blocks. The
request leaves the worker when its predicted TTFT there breaks the limit, or is more than
`MAX_SLOWDOWN` times the least one.
"""

from collections import OrderedDict
from collections.abc import Sequence

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.modes.least_ttft import MinTtft
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    ModeSettings,
    TtftSlo,
)

#: How many times the least TTFT a session's own worker may take.
MAX_SLOWDOWN = 1.2
#: Prompts that are remembered at the most; the oldest ones are forgotten first.
MAX_PROMPTS = 65_536


@PLACEMENT_MODES.register
class SessionSticky(MinTtft):
    """Prefer the worker that served the longest known beginning of a prompt; else as `min_ttft`."""

    name = "session_sticky"
    summary = f"the session's last worker, unless over {MAX_SLOWDOWN:g} times the least TTFT"

    def __init__(self, settings: ModeSettings) -> None:
        """Open the mode; no session is known."""
        super().__init__(settings)
        #: The worker that prefilled each remembered prompt, by the prompt's last full block.
        self._workers: OrderedDict[BlockHash, WorkerId] = OrderedDict()

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the row of the session's last worker if it is soon enough, else the soonest."""
        soonest = super().choose(job, rows, ttft_slo_s).row
        if (worker_id := self.preferred_worker(job)) is None:
            return Choice(soonest)
        limit_s = ttft_slo_s(worker_id)
        for row in rows:
            if row.worker_id != worker_id:
                continue
            keeps_limit = limit_s is None or row.ttft_s <= limit_s
            if keeps_limit and row.ttft_s <= MAX_SLOWDOWN * soonest.ttft_s:
                return Choice(row, worker_id)
        return Choice(soonest, worker_id)

    def preferred_worker(self, job: PlacementRequest) -> WorkerId | None:
        """Return the worker that served the longest known beginning of the prompt."""
        last = next(filter(self._workers.__contains__, reversed(job.block_hashes)), None)
        return None if last is None else self._workers[last]

    def on_prefill_done(self, block_hashes: Sequence[BlockHash], worker_id: WorkerId) -> None:
        """Remember the worker of a prompt of at least one full block."""
        if not block_hashes:
            return
        self._workers[block_hashes[-1]] = worker_id
        self._workers.move_to_end(block_hashes[-1])
        if len(self._workers) > MAX_PROMPTS:
            self._workers.popitem(last=False)

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say whether the session stayed with its last worker."""
        if placement.prefill == placement.preferred:
            ttft_s = describe_seconds(placement.ttft_s)
            return f"served this session last, first token in {ttft_s}"
        soonest = super().explain_choice(placement)
        if placement.preferred is None:
            return soonest
        return f"{soonest}; {placement.preferred}, which served this session last, is too late"

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say how much sooner or later the first token would come, and what that means."""
        sooner_s = placement.ttft_s - row.ttft_s
        if sooner_s >= 0 and placement.prefill == placement.preferred:
            gain = f"{describe_seconds(sooner_s)} sooner" if sooner_s else "as soon"
            return f"{gain}, too little to leave the session's worker"
        reason = super().explain_rejection(row, placement)
        if row.worker_id == placement.preferred:
            return f"{reason}, too much to stay with the session's last worker"
        return reason
