"""A landing shares pages only where all that write to it leave them alone."""

from typing import Any

import pytest

from halfmoon_protocol.messages import Cancel, PrefillCost, ReserveDecode, Stage, StartPrefill
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.scheduling_inputs import LAYOUT, a_request
from tests.scheduling.core import D0, P0, Core, message_to, sent

SIZE = LAYOUT.block_size
N_TOKENS = 2 * SIZE + 8
KNOWS: dict[str, Any] = {"skips_held_blocks": True}
KEEPS: dict[str, Any] = {"keeps_pages": True, "skips_held_blocks": True}


def a_core(prefill: dict[str, Any], decode: dict[str, Any]) -> Core:
    core = Core()
    core.join("prefill-0", **prefill)
    core.join("decode-0", **decode)
    return core


def reserve(core: Core, **fields: Any) -> ReserveDecode:
    message = message_to(core.arrive(**({"n_tokens": N_TOKENS} | fields)), D0)
    assert isinstance(message, ReserveDecode)
    return message


def test_prefill_is_told_which_blocks_decode_has() -> None:
    core = a_core(KNOWS, KEEPS)
    assert reserve(core).block_hashes == a_request(n_tokens=N_TOKENS).block_hashes
    assert message_to(core.reserved(n_held_blocks=2), P0).n_held_blocks == 2


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, KEEPS), (KNOWS, {}), (KNOWS, {"skips_held_blocks": True})]
)
def test_decode_gets_no_hashes_where_a_side_does_not_know_them(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    core = a_core(prefill, decode)
    assert reserve(core).block_hashes == ()
    assert message_to(core.reserved(n_held_blocks=0), P0).n_held_blocks == 0


@pytest.mark.parametrize(
    ("prefill", "n_held"), [({}, 1), (KNOWS, 3), (KNOWS, 2**40)], ids=["unasked", "all", "absurd"]
)
def test_a_landing_that_claims_what_it_can_not_hold_is_given_up(
    prefill: dict[str, Any], n_held: int
) -> None:
    core = a_core(prefill, KEEPS)
    reserve(core)
    assert (D0, Cancel) in (commands := sent(core.reserved(n_held_blocks=n_held)))
    assert StartPrefill not in [kind for _, kind in commands]


@pytest.mark.parametrize("knows", [True, False])
def test_every_stage_of_a_group_must_know_held_blocks(knows: bool) -> None:
    core = Core()
    for i in range(2):
        stage, skips = Stage("group", i, 2, chunk_tokens=SIZE), knows or i == 0
        fields: dict[str, Any] = {"stage": stage, "prefill_cost": PrefillCost(0.0, 1e-3)}
        core.join(f"prefill-{i}", n_blocks=1024, skips_held_blocks=skips, **fields)
    core.join("decode-0", n_blocks=1024, **KEEPS)
    assert bool(reserve(core, n_tokens=1000).block_hashes) == knows
    start = message_to(core.reserved(n_held_blocks=1 if knows else 0), P0)
    assert len(start.stages) == 1, "no group was chosen"


@pytest.mark.parametrize("scored", [True, False])
def test_a_decode_worker_that_prefills_shares_pages_unless_it_scores_the_prompt(
    scored: bool,
) -> None:
    cost = PrefillCost(1e-6, 1e-9)
    decode = KEEPS | {"local_prefill_tokens": 4096, "prefill_cost": cost}
    core = a_core({"prefill_cost": PrefillCost(5.0, 1.0)}, decode)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0 if scored else None)
    assert bool(reserve(core, sampling=sampling).block_hashes) != scored
    assert sent(core.reserved(n_held_blocks=0)) == [(D0, StartPrefill)]
