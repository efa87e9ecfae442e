"""What operators read about a placement: why this worker, and why not the others."""

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.placement.durations import describe_seconds
from halfmoon_scheduling.placement.estimates import Estimate, Placement
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_scheduling.placement.placement_explanations import explain_rejected_candidate


def a_row(name: str, queue_s: float, transfer_s: float, prefill_s: float) -> Estimate:
    ttft_s = queue_s + transfer_s + prefill_s
    return Estimate(WorkerId(name), None, 0, None, 0, 0, queue_s, transfer_s, prefill_s, ttft_s)


def why_not(row: Estimate, chosen: Estimate, mode: str) -> str:
    placement = Placement(chosen, WorkerId("decode-0"), 0.05, (chosen, row))
    return explain_rejected_candidate(row, placement, PLACEMENT_MODES[mode])


def test_each_candidate_says_why_it_was_not_taken() -> None:
    chosen = a_row("prefill-1", 0.0, 0.2, 0.3)
    assert why_not(chosen, chosen, "kvcache_centric") == ""
    later = a_row("prefill-2", 1.0, 0.0, 0.8)
    assert why_not(later, chosen, "kvcache_centric") == (
        "first token 1.30 s later (queue +1.00 s, prefill +500 ms)"
    )
    assert why_not(later, chosen, "load_balance") == "queue 1.00 s longer"
    assert why_not(later, chosen, "random") == "not drawn"
    queued = a_row("prefill-0", 0.2, 0.0, 0.3)
    assert why_not(queued, chosen, "min_ttft") == "as soon, behind a longer queue"
    twin = a_row("prefill-3", 0.0, 0.2, 0.3)
    assert why_not(twin, chosen, "min_ttft") == "as soon, a later name"
    local = LocalPrefillEstimate(
        *(WorkerId("decode-0"), None, 0, None, 0, 0, 0.0, 0.0, 0.1, 0.1),
        *(0.4, 0.05, WorkerId("prefill-1")),
    )
    assert why_not(local, chosen, "min_ttft") == (
        "others there would wait 400 ms for a token, over their 50 ms"
    )


def test_times_are_written_as_people_read_them() -> None:
    assert [describe_seconds(s) for s in (0.0, 0.0012, 0.0123, 0.25, 1.5)] == [
        "0 ms", "1.2 ms", "12 ms", "250 ms", "1.50 s",
    ]  # fmt: skip
