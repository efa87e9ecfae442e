"""Choose the prefill worker whose first token is soon and whose work for it is little.

A prefill delays its own first token, and all that waits behind it. The least TTFT counts the first
delay only: it computes a long prefix a second time wherever the queue is a little shorter, and that
copy takes the place of another prefix. Here seconds of prefill count once more, for the others. It
suits workers that can't fetch each other's prefixes, as plain inference servers are.
"""

from collections.abc import Sequence

from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.modes.least_ttft import LeastTtft
from halfmoon_scheduling.placement.placement_mode import (
    PLACEMENT_MODES,
    Choice,
    PrefixSource,
    TtftSlo,
    explain_later_ttft,
)

#: Seconds that one second of a worker's time costs all other requests together.
OTHERS_DELAY = 1.0


@PLACEMENT_MODES.register
class LeastWork(LeastTtft):
    """Use the prefix that is sooner here, and prefer workers that have to compute less."""

    name = "least_work"
    summary = "the least TTFT where seconds of prefill count twice, since others wait for them"

    def prefix_source(self, own_blocks: int, longest_blocks: int) -> PrefixSource:
        """Return the faster one of both."""
        return PrefixSource.FASTER

    def choose(
        self, job: PlacementRequest, rows: Sequence[Estimate], ttft_slo_s: TtftSlo
    ) -> Choice:
        """Return the row with the least cost; among equals the shorter queue, then the lower id."""
        return Choice(min(rows, key=lambda row: (_cost_s(row), row.queue_s, row.worker_id)))

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


def _cost_s(row: Estimate) -> float:
    return row.ttft_s + OTHERS_DELAY * row.prefill_s
