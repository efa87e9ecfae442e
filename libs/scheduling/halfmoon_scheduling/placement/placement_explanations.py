"""Explain a placement to an operator: why this worker, and why not the others.

What depends on the placement mode is asked of the mode; the rest is the same in all of them.
"""

from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.placement_mode import PlacementMode
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate


def explain_placement(placement: Placement, mode: type[PlacementMode]) -> str:
    """Say why a request was placed where it was: prefill worker, cached prefix, decode worker."""
    prefill = _explain_prefill(placement, mode)
    return f"{prefill}; {_describe_prefix(placement.chosen)}; {_describe_decode(placement)}"


def explain_rejected_candidate(
    row: Estimate, placement: Placement, mode: type[PlacementMode]
) -> str:
    """Say why a request was not placed at this row's worker; empty for the chosen row."""
    chosen = placement.chosen
    if row == chosen:
        return ""
    if row.worker_id in placement.without_room:
        return "its server has no room to decode"
    if isinstance(row, LocalPrefillEstimate) and row.stalled_step_s > row.tbt_slo_s:
        return (
            f"others there would wait {describe_seconds(row.stalled_step_s)} for a token, "
            f"over their {describe_seconds(row.tbt_slo_s)}"
        )
    if isinstance(row, GroupEstimate) and row.ttft_s <= chosen.ttft_s:
        return "sooner by too little to keep all of its members busy"
    return mode.explain_rejection(row, placement)


def _explain_prefill(placement: Placement, mode: type[PlacementMode]) -> str:
    chosen = placement.chosen
    if isinstance(chosen, LocalPrefillEstimate):
        return f"{chosen.worker_id} prefills by itself within a step"
    name: str = chosen.worker_id
    if isinstance(chosen, GroupEstimate):
        name = f"{chosen.group} ({', '.join(chosen.members)})"
    if placement.n_candidates == 1:
        return f"{name}: the only one that could"
    return f"{name}: {mode.explain_choice(placement)}"


def _describe_prefix(chosen: Estimate) -> str:
    if not chosen.n_blocks:
        return "nothing of it is cached"
    blocks = "block" if chosen.n_blocks == 1 else "blocks"
    if not chosen.transfer_blocks:
        return f"{chosen.n_blocks} {blocks} at its own {chosen.source}"
    return (
        f"{chosen.n_blocks} {blocks} from {chosen.source}, "
        f"of which its own {chosen.home or 'kvstore'} has {chosen.local_blocks}"
    )


def _describe_decode(placement: Placement) -> str:
    if placement.decode is None:
        return "no decode worker has room"
    if isinstance(placement.chosen, LocalPrefillEstimate):
        return "and decodes it"
    return f"{placement.decode} for decode, {describe_seconds(placement.tbt_s)} between tokens"
