"""Prompts that are prefilled where they are decoded, from records to messages.

A prefill token takes 10 ms everywhere, a decode step 40 ms; a block of 16 tokens is 1,024 bytes.
"""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    CachedPrefix,
    Cancel,
    DecodeCost,
    DecodeFailed,
    DecodeLoad,
    DecodeReserved,
    KvstoreAddress,
    PrefillCost,
    PrefillFailed,
    StartDecode,
    StartPrefill,
    ToConductor,
)
from halfmoon_scheduling.commands import AnyCommand, Deliver, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

PREFILL = PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0)
STEP = DecodeCost(d0_s=0.04, d1_s=0.0, d2_s=0.0)
D0, D1, K0, P0 = (WorkerId(n) for n in ("decode-0", "decode-1", "kvstore-0", "prefill-0"))
R1 = RequestId("cmpl-1")


class Core:
    """A conductor whose books are audited after every event.

    Prefill is slow, so that what decode may do by itself it does: 1 s a token.
    """

    def __init__(self, **config: Any) -> None:
        defaults = {"placement": "min_ttft", "prior_bandwidth": 1e6}
        self.conductor = Conductor(SchedulingConfig(**{**defaults, **config}))
        self.now = 0.0
        self.join("prefill-0", prefill_cost=PrefillCost(0.0, 1.0, 0.0))
        self.join("kvstore-0")
        self.hear("kvstore-0", BlocksSnapshot(sequence=-1, hashes=()))
        self.join_decode()

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    def join(self, worker: str, **fields: Any) -> None:
        self.handle(WorkerJoined(a_worker(worker, **{"n_blocks": 128, **fields})))

    def join_decode(self, worker: str = "decode-0", tokens: int = 32, **fields: Any) -> None:
        costs = {"prefill_cost": PREFILL, "decode_cost": STEP}
        self.join(worker, local_prefill_tokens=tokens, **{**costs, **fields})

    def hear(self, worker: str, message: ToConductor) -> list[AnyCommand]:
        return self.handle(MessageReceived(WorkerId(worker), message))

    def arrive(self, rid: str = "cmpl-1", n_tokens: int = 20, **fields: Any) -> Any:
        """The row that was chosen."""
        self.handle(RequestArrived(a_request(rid, n_tokens=n_tokens, **fields)))
        return self.conductor.decisions[-1].placement.chosen

    def reserved(self, rid: str = "cmpl-1", decode: str = "decode-0") -> Send:
        landing = a_landing(decode)
        message = DecodeReserved(request_id=RequestId(rid), landing=landing, expires_s=60.0)
        (command,) = self.hear(decode, message)
        assert isinstance(command, Send)
        return command

    def knows(self, hashes: tuple[BlockHash, ...]) -> None:
        self.join("kvstore-1", host="host-kvstore-0")
        self.hear("kvstore-1", BlocksSnapshot(sequence=-1, hashes=hashes))


def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    core = Core()
    chosen = core.arrive(n_tokens=20)
    assert isinstance(chosen, LocalPrefillEstimate)
    assert (chosen.worker_id, chosen.instead_of) == (D0, P0)
    assert chosen.ttft_s == pytest.approx(0.2)
    start = core.reserved()
    assert start.worker_id == D0
    assert isinstance(start.message, StartPrefill)
    assert start.message.landing.region.segment == D0
    deliver, go_on = core.hear("decode-0", a_prefill_done(compute_s=0.2))
    assert isinstance(deliver, Deliver)
    assert isinstance(go_on, Send)
    assert go_on.worker_id == D0
    assert isinstance(go_on.message, StartDecode)


def test_the_explanation_names_who_does_it_and_who_would_have() -> None:
    core = Core()
    core.arrive(n_tokens=20)
    (shown,) = msgspec.json.decode(msgspec.json.encode(list(core.conductor.decisions)))
    chosen = shown["placement"]["chosen"]
    assert (chosen["worker_id"], chosen["instead_of"]) == ("decode-0", "prefill-0")
    assert chosen["stalled_step_s"] == pytest.approx(0.2)
    assert chosen["tbt_slo_s"] is None  # nobody there has a limit


def test_a_worker_that_does_not_say_so_is_never_asked_to() -> None:
    core = Core()
    core.join_decode(tokens=0)
    assert core.arrive().worker_id == P0
    assert core.reserved().worker_id == P0


def test_only_a_rest_that_fits_one_step_is() -> None:
    core = Core()
    assert core.arrive(n_tokens=32).worker_id == D0
    assert core.arrive("cmpl-2", n_tokens=33, prompt=1).worker_id == P0
    core = Core()
    core.join_decode("decode-1", tokens=64, prefill_cost=PrefillCost(0.0, 0.02, 0.0))
    assert core.arrive("cmpl-3", n_tokens=33, prompt=2).worker_id == D1


def test_of_a_long_prompt_that_is_cached_the_rest_counts() -> None:
    core = Core()
    request = a_request(n_tokens=100)
    core.knows(request.block_hashes)
    chosen = core.arrive(n_tokens=100)
    assert chosen.worker_id == D0
    assert (chosen.source, chosen.n_blocks) == (WorkerId("kvstore-1"), 6)
    assert chosen.transfer_s == pytest.approx(6 * 1024 / 1e6)
    assert chosen.stalled_step_s == pytest.approx(0.04)  # 4 tokens
    start = core.reserved().message
    assert isinstance(start, StartPrefill)
    address = KvstoreAddress(WorkerId("kvstore-1"), 1, "memory://kvstore-1/commands")
    assert start.cached == CachedPrefix(address, 6)
    assert start.store_in == address


def test_the_prefill_pool_does_it_when_it_is_faster() -> None:
    core = Core()
    core.join("prefill-0", prefill_cost=PrefillCost(0.0, 0.009, 0.0))
    assert core.arrive().worker_id == P0
    rows = core.conductor.decisions[-1].placement.estimates
    assert [row.worker_id for row in rows if isinstance(row, LocalPrefillEstimate)] == [D0]


def test_nobody_in_the_batch_waits_longer_than_promised() -> None:
    """The others' own limits count, not only the applicant's or the cluster's."""
    for limit_s, local in ((0.25, True), (0.23, False)):
        core = Core()
        core.arrive("cmpl-1", n_tokens=200, prompt=1, tbt_slo_s=limit_s)  # by way of the pool
        chosen = core.arrive("cmpl-2", n_tokens=20)  # a step of 0.04 s, and 0.2 s
        assert isinstance(chosen, LocalPrefillEstimate) == local
        if local:
            assert (chosen.stalled_step_s, chosen.tbt_slo_s) == (pytest.approx(0.24), limit_s)


def test_the_limit_of_a_request_that_is_over_counts_no_more() -> None:
    core = Core()
    core.arrive("cmpl-1", n_tokens=200, prompt=1, tbt_slo_s=0.1)
    assert core.arrive("cmpl-2").worker_id == P0
    core.handle(RequestCancelled(R1))
    assert core.arrive("cmpl-3", prompt=2).worker_id == D0


def test_its_own_limit_is_for_the_steps_after_the_first_token() -> None:
    core = Core()
    assert core.arrive(n_tokens=20, tbt_slo_s=0.05).worker_id == D0  # its own step takes 0.2 s
    core = Core()
    assert core.arrive(n_tokens=20, tbt_slo_s=0.03).worker_id == P0


def test_prompts_sent_to_one_worker_wait_for_each_other() -> None:
    core = Core()
    core.join_decode("decode-1")
    chosen = [core.arrive(f"cmpl-{i}", prompt=i) for i in range(3)]
    assert [row.worker_id for row in chosen] == [D0, D1, D0]
    assert chosen[2].queue_s == pytest.approx(0.2 + 0.02)
    for rid in ("cmpl-0", "cmpl-2"):
        core.reserved(rid)
        core.hear("decode-0", a_prefill_done(rid, compute_s=0.2))
    again = core.arrive("cmpl-9", prompt=9)
    assert (again.worker_id, again.queue_s) == (D0, pytest.approx(0.02))


def test_a_worker_without_pages_is_passed_by() -> None:
    core = Core()
    core.join_decode("decode-1", prefill_cost=PrefillCost(0.0, 0.02, 0.0))
    full = DecodeLoad(
        n_running=0, n_reserved=0, context_tokens=0, free_pages=1, n_pages=128, step_s=0.0
    )
    core.hear("decode-0", full)
    assert core.arrive(n_tokens=20).worker_id == D1


@pytest.mark.parametrize("mode", ["random", "load_balance"])
def test_modes_that_do_not_compare_times_send_everything_through_the_pool(mode: str) -> None:
    assert Core(placement=mode).arrive().worker_id == P0


# -- what can go wrong ---------------------------------------------------------------------------


def test_a_client_that_goes_frees_the_landing_at_one_word() -> None:
    core = Core()
    core.arrive()
    core.reserved()
    assert core.handle(RequestCancelled(R1)) == [Send(D0, Cancel(request_id=R1))]
    assert not any(core.conductor.n_requests.values())


def test_a_lost_decode_worker_takes_both_with_it_and_the_request_is_tried_again() -> None:
    core = Core()
    core.join_decode("decode-1")
    core.arrive()
    core.reserved()
    (command,) = core.handle(WorkerLost(D0, "socket closed"))
    assert isinstance(command, Resubmit)
    assert core.arrive("cmpl-1~2", attempt=2).worker_id == D1


def test_the_prefill_worker_that_would_have_done_it_may_go() -> None:
    core = Core()
    core.arrive()
    core.reserved()
    assert core.handle(WorkerLost(P0, "socket closed")) == []
    assert any(isinstance(c, Deliver) for c in core.hear("decode-0", a_prefill_done(compute_s=0.2)))


def test_a_prefill_that_fails_there_is_tried_elsewhere() -> None:
    core = Core()
    core.join_decode("decode-1", prefill_cost=PrefillCost(0.0, 0.02, 0.0))
    core.arrive()
    core.reserved()
    failed = PrefillFailed(request_id=R1, reason="out of memory", retryable=True)
    commands = core.hear("decode-0", failed)
    assert commands[0] == Send(D0, Cancel(request_id=R1))
    assert isinstance(commands[1], Resubmit)
    assert core.arrive("cmpl-1~2", attempt=2).worker_id == D1


def test_a_landing_that_is_lost_meanwhile_is_no_prefill_to_cancel() -> None:
    core = Core()
    core.arrive()
    core.reserved()
    failed = DecodeFailed(request_id=R1, reason="preempted", retryable=True)
    (command,) = core.hear("decode-0", failed)
    assert isinstance(command, Resubmit)


def test_limits_that_are_multiples_are_those_of_the_prefill_pool() -> None:
    core = Core(admission="early", ttft_slo_multiple=0.5, tbt_slo_multiple=2.0)
    assert core.arrive(n_tokens=20).worker_id == D0  # 0.2 s, and 20 s would be alone at prefill-0
    core = Core(admission="early", ttft_slo_multiple=0.005)
    core.arrive(n_tokens=20)
    assert core.conductor.decisions[-1].outcome == "refused"


# -- prompts of any length, in parts -------------------------------------------------------------


def a_hybrid_core(**fields: Any) -> Core:
    core = Core()
    core.join_decode(tokens=4096, local_prefill_step_s=0.36, **fields)
    return core


def test_a_long_prompt_is_predicted_in_parts_with_steps_between_them() -> None:
    core = a_hybrid_core()
    core.arrive("cmpl-1", n_tokens=200, prompt=1)  # 2 s on an idle worker
    chosen = core.arrive("cmpl-2", n_tokens=320)
    assert isinstance(chosen, LocalPrefillEstimate)
    # Ten parts of 32 tokens, each with a step of 0.04 s; behind the first one and half a step.
    assert chosen.prefill_s == pytest.approx(3.2 + 10 * 0.04)
    assert chosen.queue_s == pytest.approx(2.0 + 0.02)
    assert chosen.stalled_step_s == pytest.approx(0.36)


def test_a_worker_that_spaces_parts_takes_prompts_of_requests_with_limits() -> None:
    for tbt_s, local in ((0.1, True), (0.12, False), (0.0, False)):
        core = a_hybrid_core(local_prefill_tbt_s=tbt_s)
        core.arrive("cmpl-1", n_tokens=20, prompt=1, tbt_slo_s=0.11)
        chosen = core.arrive("cmpl-2", n_tokens=320, tbt_slo_s=0.11)
        assert isinstance(chosen, LocalPrefillEstimate) == local
        if local:
            # A part of 0.32 s is paid by steps of 0.04 s, 0.06 s each.
            assert chosen.stalled_step_s == pytest.approx(0.04 + 0.32 / 6)
            assert chosen.prefill_s == pytest.approx(3.2 + 10 * 0.04 + 9 * 5 * 0.04)


def test_new_blocks_go_to_the_kvstore_beside_the_worker_that_computes_them() -> None:
    core = a_hybrid_core(host="here")
    core.join("prefill-0", prefill_cost=PrefillCost(0.0, 1.0, 0.0), home_kvstore="kvstore-0")
    core.join("kvstore-2", host="here")
    core.hear("kvstore-2", BlocksSnapshot(sequence=-1, hashes=()))
    core.arrive(n_tokens=100)
    start = core.reserved().message
    assert isinstance(start, StartPrefill)
    assert start.store_in == KvstoreAddress(WorkerId("kvstore-2"), 1, "memory://kvstore-2/commands")
