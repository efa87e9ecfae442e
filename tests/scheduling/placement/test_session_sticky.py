"""The mode that keeps a session on its worker: by hand, and in a conductor from turn to turn."""

import pytest

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.placement.estimates import Estimate, Placement, PlacementRequest
from halfmoon_scheduling.placement.modes import open_placement_mode
from halfmoon_scheduling.placement.modes.session_sticky import MAX_PROMPTS, SessionSticky
from halfmoon_scheduling.placement.placement_explanations import (
    explain_placement,
    explain_rejected_candidate,
)
from halfmoon_scheduling.placement.placement_mode import ModeSettings, PlacementMode
from tests.scheduling.core import D0, P0, P1, Core


def hashes(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([number]) * 16) for number in numbers)


def job(*blocks: int) -> PlacementRequest:
    return PlacementRequest(RequestId("cmpl-1"), 100, 11, 10, 100, hashes(*blocks))


def row(worker: WorkerId, ttft_s: float) -> Estimate:
    return Estimate(worker, None, 0, None, 0, 0, 0.0, 0.0, ttft_s, ttft_s)


def place(
    mode: PlacementMode,
    blocks: tuple[int, ...],
    ttfts: tuple[float, float],
    slo_s: float | None = None,
) -> Placement:
    rows = (row(P0, ttfts[0]), row(P1, ttfts[1]))
    chosen, preferred = mode.choose(job(*blocks), rows, lambda _: slo_s)
    return Placement(chosen, D0, 0.05, rows, preferred)


@pytest.fixture
def mode() -> PlacementMode:
    """A mode that knows one prompt, of blocks 1 and 2, prefilled by prefill-1."""
    mode = open_placement_mode("session_sticky")
    mode.on_prefill_done(hashes(1, 2), P1)
    return mode


#: Of prompts by their blocks: when each worker's first token would come, the limit, the choice.
TURNS: dict[str, tuple[tuple[int, ...], tuple[float, float], float | None, WorkerId]] = {
    "one that continues another goes to its worker": ((1, 2, 3, 4), (1.0, 1.1), None, P1),
    "so does one that is the same": ((1, 2), (1.0, 1.1), None, P1),
    "with its first block alone in common it is another session": ((1, 3), (1.0, 1.1), None, P0),
    "its worker may be slower by a factor": ((1, 2, 3), (1.0, 1.2), None, P1),
    "but not by more": ((1, 2, 3), (1.0, 1.21), None, P0),
    "a limit that is kept changes nothing": ((1, 2, 3), (1.0, 1.2), 1.2, P1),
    "for one that would be broken it leaves": ((1, 2, 3), (1.0, 1.2), 1.1, P0),
    "without a full block it is no session": ((), (1.1, 1.0), None, P1),
}


@pytest.mark.parametrize(("blocks", "ttfts", "slo_s", "chosen"), TURNS.values(), ids=TURNS)
def test_of_prompts(
    mode: PlacementMode,
    blocks: tuple[int, ...],
    ttfts: tuple[float, float],
    slo_s: float | None,
    chosen: WorkerId,
) -> None:
    mode.on_prefill_done((), P0)
    placement = place(mode, blocks, ttfts, slo_s)
    assert placement.prefill == chosen
    assert placement.preferred == (P1 if blocks[:2] == (1, 2) else None)


def test_the_longest_known_beginning_decides_and_a_worker_that_is_gone_does_not(
    mode: PlacementMode,
) -> None:
    mode.on_prefill_done(hashes(1, 2, 3), P0)
    assert place(mode, (1, 2, 3, 4), (1.1, 1.0)).prefill == P0
    assert place(mode, (1, 2, 9), (1.0, 1.1)).prefill == P1
    mode.on_prefill_done(hashes(1, 2), WorkerId("prefill-9"))
    assert place(mode, (1, 2, 9), (1.0, 1.1)).prefill == P0


def test_the_oldest_prompts_are_forgotten() -> None:
    mode = SessionSticky(ModeSettings())
    names = [BlockHash(number.to_bytes(16, "big")) for number in range(MAX_PROMPTS + 1)]
    for name in names[:MAX_PROMPTS]:
        mode.on_prefill_done([name], P1)
    mode.on_prefill_done(names[:1], P1)  # used again: now the second one is the oldest
    mode.on_prefill_done(names[-1:], P1)
    rows = (row(P0, 1.0), row(P1, 1.0))
    jobs = [PlacementRequest(RequestId("r"), 100, 11, 10, 100, (name,)) for name in names[:3]]
    assert [mode.choose(job, rows, lambda _: None).preferred for job in jobs] == [P1, None, P1]


def test_choices_say_what_the_session_had_to_do_with_them(mode: PlacementMode) -> None:
    stayed = place(mode, (1, 2, 3), (1.0, 1.1))
    assert explain_placement(stayed, SessionSticky).startswith(
        "prefill-1: served this session last, first token in 1.10 s; "
    )
    assert explain_rejected_candidate(stayed.estimates[0], stayed, SessionSticky) == (
        "100 ms sooner, too little to leave the session's worker"
    )
    left = place(mode, (1, 2, 3), (1.0, 2.0))
    assert explain_placement(left, SessionSticky).startswith(
        "prefill-0: the soonest of 2, first token in 1.00 s; "
        "prefill-1, which served this session last, is too late; "
    )
    assert explain_rejected_candidate(left.estimates[1], left, SessionSticky) == (
        "first token 1.00 s later (prefill +1.00 s), "
        "too much to stay with the session's last worker"
    )
    new = place(mode, (7,), (1.0, 2.0))
    assert explain_placement(new, SessionSticky).startswith("prefill-0: the soonest of 2, ")
    assert explain_rejected_candidate(new.estimates[1], new, SessionSticky) == (
        "first token 1.00 s later (prefill +1.00 s)"
    )


def test_a_conductor_sends_the_next_turn_where_the_one_before_it_was_prefilled() -> None:
    core = Core("decode-0", placement="session_sticky")
    for name in ("prefill-0", "prefill-1"):
        core.join(name, prefill_cost=PrefillCost(c0_s=2.0, c1_s=0.0))
    for number in (1, 2):  # the second one while prefill-0 is busy
        core.arrive(f"cmpl-{number}", prompt=number)
        core.reserved(rid=f"cmpl-{number}")
    core.now = 2.0
    core.prefilled(P0, "cmpl-1", compute_s=2.0)
    core.prefilled(P1, "cmpl-2", compute_s=2.0)
    core.now = 5.0
    core.arrive("cmpl-3", prompt=2, n_tokens=60)
    why = [explain_placement(each.placement, SessionSticky) for each in core.conductor.decisions]
    assert why[0].startswith("prefill-0: the soonest of 2, first token in 2.00 s; ")
    assert why[1].startswith("prefill-1: the soonest of 2, first token in 2.00 s; ")
    assert why[2].startswith("prefill-1: served this session last, first token in 2.00 s; ")
