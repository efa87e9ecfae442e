"""Choose the prefill worker with the least predicted TTFT, in three modes.

The modes differ in the cached prefix that a worker uses. `kvcache_centric` is Algorithm 1 of
Mooncake (arXiv 2407.00079, section 6). A worker's own prefix is what its home kvstore holds; the
best prefix is the longest that any kvstore holds. While ``best/own <= threshold`` the own prefix
is used, also when no kvstore holds any. Else the best one is fetched: an own prefix of 0 beside
a best one above 0 is an infinite ratio.
"""

from abc import abstractmethod
from collections.abc import Sequence

from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    PlacementMode,
    PrefixSource,
    TtftSlo,
    explain_later_ttft,
    rank_of,
)


class LeastTtft(PlacementMode):
    """Compare rows by predicted time to first token, then by queue, then by id."""

    ranks_by = "ttft"

    @abstractmethod
    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """See `PlacementMode.prefix_source`."""

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the row with the least TTFT; among equals the shorter queue, then the lower id."""
        return Choice(min(rows, key=rank_of(self)))

    @classmethod
    def explain_choice(cls, placement: Placement) -> str:
        """Say how soon the first token comes."""
        n, ttft_s = placement.n_candidates, placement.ttft_s
        return f"the soonest of {n}, first token in {describe_seconds(ttft_s)}"

    @classmethod
    def explain_rejection(cls, row: Estimate, placement: Placement) -> str:
        """Say how much later the first token would come, and what takes longer."""
        chosen = placement.chosen
        if row.ttft_s > chosen.ttft_s:
            return explain_later_ttft(row, chosen)
        if row.ttft_s < chosen.ttft_s:
            return "sooner, and not chosen so that others keep their limits"
        longer_queue = row.queue_s > chosen.queue_s
        return "as soon, behind a longer queue" if longer_queue else "as soon, a later name"


@PLACEMENT_MODES.register
class CacheAware(LeastTtft):
    """Use only the prefix in the worker's own kvstore."""

    name = "cache_aware"
    summary = "the least TTFT, with the prefix in that worker's own kvstore"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the own prefix: nothing is transferred."""
        return PrefixSource.OWN


@PLACEMENT_MODES.register
class KvcacheCentric(LeastTtft):
    """Fetch the best prefix where it is longer than the own one by more than a threshold."""

    name = "kvcache_centric"
    summary = "the least TTFT, with the own prefix or the best one by Algorithm 1 of Mooncake"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the longest prefix if ``longest/own > threshold``.

        The quotient is compared, not a product. It is the double nearest to the true ratio, as a
        threshold written in decimals is, so that equal ones are equal.
        """
        threshold = self._settings.kvcache_balancing_threshold
        if own_blocks == 0 or longest_blocks / own_blocks > threshold:
            return PrefixSource.LONGEST
        return PrefixSource.OWN


@PLACEMENT_MODES.register
class MinTtft(LeastTtft):
    """Use the own prefix or the longest one, whichever is predicted to be faster."""

    name = "min_ttft"
    summary = "the least TTFT, with the own prefix or the longest one, whichever is faster"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the faster one of both."""
        return PrefixSource.FASTER
