"""Choose the prefill worker with the shortest queue: load balancing that ignores caches."""

from collections.abc import Sequence

from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    PlacementMode,
    PrefixSource,
    TtftSlo,
    rank_of,
)


@PLACEMENT_MODES.register
class ShortestQueue(PlacementMode):
    """Choose the prefill worker whose queue is predicted to end first."""

    name = "load_balance"
    summary = "the shortest queue, with the prefix in that worker's own kvstore"
    compares_ttft = False
    ranks_by = "queue"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the own prefix: nothing is transferred."""
        return PrefixSource.OWN

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the row with the shortest queue; among equals the lowest id."""
        return Choice(min(rows, key=rank_of(self)))

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say how short the queue is."""
        queue_s = placement.chosen.queue_s
        return f"the shortest of {placement.n_candidates} queues, {describe_seconds(queue_s)}"

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say how much longer the queue is."""
        longer_s = row.queue_s - placement.chosen.queue_s
        if longer_s > 0:
            return f"queue {describe_seconds(longer_s)} longer"
        return "the same queue, a later name"
