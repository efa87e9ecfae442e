"""A decision in words: why this worker, and why not the others.

Placement compares numbers and keeps them; what they came to is said here, for operators.
"""

from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.config import PlacementMode
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.placement_policy import Estimate, Placement
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate


def explain_placement(decision: Decision, mode: PlacementMode) -> str:
    """Why a request was placed where it was; why not, for one that was not placed."""
    if decision.outcome != "placed":
        return decision.reason
    placement = decision.placement
    return f"{_prefill(placement, mode)}; {_prefix(placement.chosen)}; {_decode(placement)}"


def explain_rejected_candidate(row: Estimate, chosen: Estimate, mode: PlacementMode) -> str:
    """Why the request did not go here; empty for the row that was chosen."""
    if row == chosen:
        return ""
    if isinstance(row, LocalPrefillEstimate) and row.stalled_step_s > row.tbt_slo_s:
        return (
            f"others there would wait {describe_seconds(row.stalled_step_s)} for a token, "
            f"over their {describe_seconds(row.tbt_slo_s)}"
        )
    if mode == "random":
        return "not drawn"
    if mode == "load_balance":
        more_s = row.queue_s - chosen.queue_s
        return (
            f"queue {describe_seconds(more_s)} longer"
            if more_s > 0
            else "the same queue, a later name"
        )
    later_s = row.ttft_s - chosen.ttft_s
    if later_s > 0:
        return f"first token {describe_seconds(later_s)} later{_because(row, chosen)}"
    if isinstance(row, GroupEstimate):
        return "sooner by too little to keep all of its members busy"
    if later_s < 0:
        return "sooner, and not chosen so that others keep their limits"
    longer_s = row.queue_s - chosen.queue_s
    return "as soon, behind a longer queue" if longer_s > 0 else "as soon, a later name"


def describe_seconds(value: float) -> str:
    """A time as people read it."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.2g} ms"


def _prefill(placement: Placement, mode: PlacementMode) -> str:
    chosen, n = placement.chosen, len(placement.estimates)
    if isinstance(chosen, LocalPrefillEstimate):
        return f"{chosen.worker_id} prefills by itself within a step"
    name: str = chosen.worker_id
    if isinstance(chosen, GroupEstimate):
        name = f"{chosen.group} ({', '.join(chosen.members)})"
    if n == 1:
        return f"{name}: the only one that could"
    if mode == "random":
        return f"{name}: drawn among {n}"
    if mode == "load_balance":
        return f"{name}: the shortest of {n} queues, {describe_seconds(chosen.queue_s)}"
    return f"{name}: the soonest of {n}, first token in {describe_seconds(chosen.ttft_s)}"


def _prefix(chosen: Estimate) -> str:
    if not chosen.n_blocks:
        return "nothing of it is cached"
    blocks = "block" if chosen.n_blocks == 1 else "blocks"
    if not chosen.transfer_blocks:
        return f"{chosen.n_blocks} {blocks} at its own {chosen.source}"
    return (
        f"{chosen.n_blocks} {blocks} from {chosen.source}, "
        f"of which its own {chosen.home or 'kvstore'} has {chosen.local_blocks}"
    )


def _decode(placement: Placement) -> str:
    if placement.decode is None:
        return "no decode worker has room"
    if isinstance(placement.chosen, LocalPrefillEstimate):
        return "and decodes it"
    return f"{placement.decode} for decode, {describe_seconds(placement.tbt_s)} between tokens"


def _because(row: Estimate, chosen: Estimate) -> str:
    """What of it takes longer, the most first."""
    more = [
        (row.queue_s - chosen.queue_s, "queue"),
        (row.transfer_s - chosen.transfer_s, "transfer"),
        (row.prefill_s - chosen.prefill_s, "prefill"),
    ]
    told = [
        f"{part} +{describe_seconds(s)}" for s, part in sorted(more, reverse=True) if s >= 0.0005
    ]
    return f" ({', '.join(told)})" if told else ""
