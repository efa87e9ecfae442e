"""A landing shares pages only where all that write to it leave them alone."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeReserved,
    PrefillCost,
    ReserveDecode,
    Stage,
    StartPrefill,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import MessageReceived, RequestArrived, WorkerJoined
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_request, a_worker

SIZE = LAYOUT.block_size
N_TOKENS = 2 * SIZE + 8
KNOWS: dict[str, Any] = {"skips_held_blocks": True}
KEEPS: dict[str, Any] = {"keeps_pages": True, "skips_held_blocks": True}


def core(prefill: dict[str, Any], decode: dict[str, Any]) -> Conductor:
    conductor = Conductor(SchedulingConfig())
    for name, fields in (("prefill-0", prefill), ("decode-0", decode)):
        conductor.handle(WorkerJoined(a_worker(name, **fields)), 0.0)
    return conductor


def sent(commands: list[AnyCommand], kind: type) -> Any:
    (message,) = [
        c.message for c in commands if isinstance(c, Send) and isinstance(c.message, kind)
    ]
    return message


def reserve(conductor: Conductor, **fields: Any) -> ReserveDecode:
    fields = {"n_tokens": N_TOKENS} | fields
    message = sent(conductor.handle(RequestArrived(a_request(**fields)), 0.0), ReserveDecode)
    assert isinstance(message, ReserveDecode)
    return message


def reserved(conductor: Conductor, n_held: int) -> list[AnyCommand]:
    answer = DecodeReserved(
        request_id=RequestId("cmpl-1"),
        landing=a_landing("decode-0"),
        expires_s=60.0,
        n_held_blocks=n_held,
    )
    return conductor.handle(MessageReceived(WorkerId("decode-0"), answer), 0.0)


def test_prefill_is_told_which_blocks_decode_has() -> None:
    conductor = core(KNOWS, KEEPS)
    assert reserve(conductor).block_hashes == a_request(n_tokens=N_TOKENS).block_hashes
    assert sent(reserved(conductor, 2), StartPrefill).n_held_blocks == 2


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, KEEPS), (KNOWS, {}), (KNOWS, {"skips_held_blocks": True})]
)
def test_decode_gets_no_hashes_where_a_side_does_not_know_them(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    conductor = core(prefill, decode)
    assert reserve(conductor).block_hashes == ()
    assert sent(reserved(conductor, 0), StartPrefill).n_held_blocks == 0


@pytest.mark.parametrize(
    ("prefill", "n_held"), [({}, 1), (KNOWS, 3), (KNOWS, 2**40)], ids=["unasked", "all", "absurd"]
)
def test_a_landing_that_claims_what_it_can_not_hold_is_given_up(
    prefill: dict[str, Any], n_held: int
) -> None:
    conductor = core(prefill, KEEPS)
    reserve(conductor)
    commands = reserved(conductor, n_held)
    assert sent(commands, Cancel).request_id == "cmpl-1"
    assert not [c for c in commands if isinstance(c, Send) and isinstance(c.message, StartPrefill)]
    conductor.check()


@pytest.mark.parametrize("knows", [True, False])
def test_every_stage_of_a_group_must_know_held_blocks(knows: bool) -> None:
    conductor = Conductor(SchedulingConfig())
    cost = PrefillCost(0.0, 1e-3)
    for i in range(2):
        stage = Stage("group", i, 2, chunk_tokens=SIZE)
        fields: dict[str, Any] = {"stage": stage, "prefill_cost": cost, "n_blocks": 1024}
        info = a_worker(f"prefill-{i}", **fields, skips_held_blocks=knows or i == 0)
        conductor.handle(WorkerJoined(info), 0.0)
    conductor.handle(WorkerJoined(a_worker("decode-0", n_blocks=1024, **KEEPS)), 0.0)
    assert bool(reserve(conductor, n_tokens=1000).block_hashes) == knows
    start = sent(reserved(conductor, 1 if knows else 0), StartPrefill)
    assert len(start.stages) == 1, "no group was chosen"


@pytest.mark.parametrize("scored", [True, False])
def test_a_decode_worker_that_prefills_shares_pages_unless_it_scores_the_prompt(
    scored: bool,
) -> None:
    cost = PrefillCost(1e-6, 1e-9)
    decode = KEEPS | {"local_prefill_tokens": 4096, "prefill_cost": cost}
    conductor = core({"prefill_cost": PrefillCost(5.0, 1.0)}, decode)
    sampling = Sampling(temperature=0.0, prompt_logprobs=0 if scored else None)
    assert bool(reserve(conductor, sampling=sampling).block_hashes) != scored
    start = [c for c in reserved(conductor, 0) if isinstance(c, Send)]
    assert [c.worker_id for c in start if isinstance(c.message, StartPrefill)] == ["decode-0"]
