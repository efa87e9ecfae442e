"""Choose any prefill worker: the baseline that knows neither queues nor caches."""

from collections.abc import Sequence

from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    PlacementMode,
    PrefixSource,
    TtftSlo,
)
from halfmoon_scheduling.placement.stable_draw import stable_draw


@PLACEMENT_MODES.register
class RandomWorker(PlacementMode):
    """Choose a prefill worker by a hash of the seed and the request's id."""

    name = "random"
    summary = "any worker, with the prefix in its own kvstore"
    compares_ttft = False
    ranks_by = "ttft"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the own prefix: nothing is transferred."""
        return PrefixSource.OWN

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the drawn row."""
        return Choice(rows[self.drawn_index(job, len(rows))])

    def drawn_index(self, job: PlacementRequest, n_candidates: int) -> int:
        """Draw a candidate; the same request and seed give the same one."""
        return stable_draw(str(self._settings.seed), job.request_id) % n_candidates

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say among how many workers was drawn."""
        return f"drawn among {placement.n_candidates}"

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say that another worker was drawn."""
        return "not drawn"
