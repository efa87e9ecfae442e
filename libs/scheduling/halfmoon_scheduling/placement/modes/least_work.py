"""Choose the prefill worker whose first token is soon, and whose work for it delays others least.

A prefill delays its own first token, and all that waits behind it. The least TTFT counts the first
delay only. So it computes a long prefix a second time wherever the queue is a little shorter, and
that copy takes the place of another prefix. And among idle workers it always takes the same one,
which then has all prefixes, and with them all later requests.

Here seconds of prefill count once more for the others, in proportion to the work that the worker
got lately. It suits workers that can't fetch each other's prefixes, as plain inference servers are.
"""

from collections.abc import Sequence

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.modes.least_ttft import LeastTtft
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    ModeSettings,
    PrefixSource,
    TtftSlo,
    explain_later_ttft,
)

#: Seconds that one second of a worker's time costs all other requests together, while all workers
#: get equal work.
OTHERS_DELAY = 1.0
#: Share of the work lately given that each further request makes forgotten.
FORGOTTEN = 0.02
#: Less is forgotten: of workers that are gone, nothing stays.
_NOTHING_S = 1e-6


@PLACEMENT_MODES.register
class LeastWork(LeastTtft):
    """Use the prefix that is sooner here, and prefer workers that have to compute less."""

    name = "least_work"
    summary = "the least TTFT, with what the prefill costs the others at that worker"

    def __init__(self, settings: ModeSettings) -> None:
        """Open the mode; no worker has got work."""
        super().__init__(settings)
        #: Seconds of prefill that each worker got lately, and their sum.
        self._given_s: dict[WorkerId, float] = {}
        self._total_s = 0.0

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the faster one of both."""
        return PrefixSource.FASTER

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the row with the least cost; among equals the shorter queue, then the lower id."""
        row = min(rows, key=lambda row: (self._cost_s(row, len(rows)), row.queue_s, row.worker_id))
        self._give(row.worker_id, row.prefill_s)
        return Choice(row)

    def _cost_s(self, row: Estimate, n_workers: int) -> float:
        given_s = self._given_s.get(row.worker_id, 0.0)
        load = n_workers * given_s / self._total_s if self._total_s else 1.0
        return row.ttft_s + OTHERS_DELAY * load * row.prefill_s

    def _give(self, worker_id: WorkerId, seconds: float) -> None:
        """Count work, and forget some of all that was given before."""
        kept = {w: s * (1 - FORGOTTEN) for w, s in self._given_s.items() if s > _NOTHING_S}
        kept[worker_id] = kept.get(worker_id, 0.0) + seconds
        self._given_s, self._total_s = kept, sum(kept.values())

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say how soon the first token comes, and for how much work."""
        n, chosen = len(placement.estimates), placement.chosen
        return (
            f"the least delay of {n}, first token in {describe_seconds(chosen.ttft_s)} for"
            f" {describe_seconds(chosen.prefill_s)} of prefill"
        )

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say how much later the first token would come, or how much more work it would be."""
        chosen = placement.chosen
        if row.ttft_s > chosen.ttft_s:
            return explain_later_ttft(row, chosen)
        more_s = row.prefill_s - chosen.prefill_s
        if more_s > 0:
            return f"not later, and {describe_seconds(more_s)} more of prefill"
        return super().explain_rejection(row, placement)

