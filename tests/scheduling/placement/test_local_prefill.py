"""Prompts that are prefilled where they are decoded, from records to messages.

A prefill token takes 10 ms everywhere, a decode step 40 ms; a block of 16 tokens is 1,024 bytes.
"""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import (
    CachedPrefix,
    Cancel,
    DecodeCost,
    KvstoreAddress,
    PrefillCost,
    StartDecode,
    StartPrefill,
)
from halfmoon_scheduling.commands import AnyCommand, Deliver, Resubmit, Send
from halfmoon_scheduling.placement.local_prefill import LocalPrefillEstimate
from halfmoon_testing.scheduling_inputs import a_request
from tests.scheduling.core import D0, D1, P0, R1, Core, message_to, only, sent

PREFILL = PrefillCost(c0_s=0.0, c1_s=0.01, c2_s=0.0)
HALF_AS_FAST = PrefillCost(c0_s=0.0, c1_s=0.02, c2_s=0.0)
STEP = DecodeCost(d0_s=0.04, d1_s=0.0, d2_s=0.0)


class Pools(Core):
    """A prefill worker so slow, 1 s a token, that what decode may do by itself it does."""

    def __init__(self, *, tokens: int = 32, **fields: Any) -> None:
        config = {k: fields.pop(k) for k in list(fields) if not k.startswith(("local_", "host"))}
        super().__init__(**{"placement": "min_ttft", "prior_bandwidth": 1e6, **config})
        self.join("prefill-0", n_blocks=128, prefill_cost=PrefillCost(0.0, 1.0, 0.0))
        self.join("kvstore-0", n_blocks=128)
        self.hold("kvstore-0", a_request(), 0)
        self.join_decode(tokens=tokens, **fields)

    def join_decode(self, worker: str = "decode-0", tokens: int = 32, **fields: Any) -> None:
        costs = {"prefill_cost": PREFILL, "decode_cost": STEP}
        self.join(worker, n_blocks=128, local_prefill_tokens=tokens, **{**costs, **fields})

    def come(self, rid: str = "cmpl-1", n_tokens: int = 20, **fields: Any) -> Any:
        """The row that was chosen."""
        self.arrive(rid, n_tokens=n_tokens, **fields)
        return self.chosen

    def done(self, rid: str = "cmpl-1") -> list[AnyCommand]:
        return self.prefilled("decode-0", rid, compute_s=0.2)


def test_a_short_prompt_is_prefilled_where_it_is_decoded() -> None:
    core = Pools()
    chosen = core.come(n_tokens=20)
    assert isinstance(chosen, LocalPrefillEstimate)
    assert (chosen.worker_id, chosen.instead_of) == (D0, P0)
    assert chosen.ttft_s == pytest.approx(0.2)
    assert message_to(core.reserved(), D0).landing.region.segment == D0
    assert core.lose("prefill-0") == [], "which has no part in it"
    commands = core.done()
    assert isinstance(commands[0], Deliver)
    assert sent(commands) == [(D0, StartDecode)]
    (shown,) = msgspec.json.decode(msgspec.json.encode(list(core.conductor.decisions)))
    chosen = shown["placement"]["chosen"]
    assert (chosen["worker_id"], chosen["instead_of"]) == ("decode-0", "prefill-0")
    assert chosen["stalled_step_s"] == pytest.approx(0.2)
    assert chosen["tbt_slo_s"] is None  # nobody there has a limit


def test_only_a_rest_is_that_fits_one_step_of_a_worker_that_says_so() -> None:
    core = Pools(tokens=0)
    assert core.come().worker_id == P0
    assert sent(core.reserved()) == [(P0, StartPrefill)]
    core = Pools()
    assert core.come(n_tokens=32).worker_id == D0
    assert core.come("cmpl-2", n_tokens=33, prompt=1).worker_id == P0
    core = Pools()
    core.join_decode("decode-1", tokens=64, prefill_cost=HALF_AS_FAST)
    assert core.come("cmpl-3", n_tokens=33, prompt=2).worker_id == D1


def test_of_a_long_prompt_that_is_cached_the_rest_counts() -> None:
    core = Pools()
    request = a_request(n_tokens=100)
    core.join("kvstore-1", n_blocks=128, host="host-kvstore-0")
    core.hold("kvstore-1", request, 6)
    chosen = core.come(n_tokens=100)
    assert chosen.worker_id == D0
    assert (chosen.source, chosen.n_blocks) == (WorkerId("kvstore-1"), 6)
    assert chosen.transfer_s == pytest.approx(6 * 1024 / 1e6)
    assert chosen.stalled_step_s == pytest.approx(0.04)  # 4 tokens
    start = message_to(core.reserved(), D0)
    address = KvstoreAddress(WorkerId("kvstore-1"), 1, "memory://kvstore-1/commands")
    assert start.cached == CachedPrefix(address, 6)
    assert start.store_in == address


def test_the_prefill_pool_does_it_when_it_is_faster() -> None:
    core = Pools()
    core.join("prefill-0", n_blocks=128, prefill_cost=PrefillCost(0.0, 0.009, 0.0))
    assert core.come().worker_id == P0
    rows = core.placement.estimates
    assert [row.worker_id for row in rows if isinstance(row, LocalPrefillEstimate)] == [D0]


def test_nobody_in_the_batch_waits_longer_than_promised() -> None:
    """The others' own limits count, not only the applicant's or the cluster's."""
    for limit_s, local in ((0.25, True), (0.23, False)):
        core = Pools()
        core.come("cmpl-1", n_tokens=200, prompt=1, tbt_slo_s=limit_s)  # by way of the pool
        chosen = core.come("cmpl-2", n_tokens=20)  # a step of 0.04 s, and 0.2 s
        assert isinstance(chosen, LocalPrefillEstimate) == local
        if local:
            assert (chosen.stalled_step_s, chosen.tbt_slo_s) == (pytest.approx(0.24), limit_s)


def test_the_limit_of_a_request_that_is_over_counts_no_more() -> None:
    core = Pools()
    core.come("cmpl-1", n_tokens=200, prompt=1, tbt_slo_s=0.1)
    assert core.come("cmpl-2").worker_id == P0
    core.cancel()
    assert core.come("cmpl-3", prompt=2).worker_id == D0


def test_its_own_limit_is_for_the_steps_after_the_first_token() -> None:
    assert Pools().come(tbt_slo_s=0.05).worker_id == D0  # its own step takes 0.2 s
    assert Pools().come(tbt_slo_s=0.03).worker_id == P0


def test_prompts_sent_to_one_worker_wait_for_each_other() -> None:
    core = Pools()
    core.join_decode("decode-1")
    chosen = [core.come(f"cmpl-{i}", prompt=i) for i in range(3)]
    assert [row.worker_id for row in chosen] == [D0, D1, D0]
    assert chosen[2].queue_s == pytest.approx(0.2 + 0.02)
    for rid in ("cmpl-0", "cmpl-2"):
        core.reserved(rid=rid)
        core.done(rid)
    again = core.come("cmpl-9", prompt=9)
    assert (again.worker_id, again.queue_s) == (D0, pytest.approx(0.02))


def test_a_worker_without_pages_is_passed_by() -> None:
    core = Pools()
    core.join_decode("decode-1", prefill_cost=HALF_AS_FAST)
    core.load(free_pages=1, n_pages=128)
    assert core.come(n_tokens=20).worker_id == D1


@pytest.mark.parametrize("mode", ["random", "load_balance"])
def test_modes_that_do_not_compare_times_send_everything_through_the_pool(mode: str) -> None:
    assert Pools(placement=mode).come().worker_id == P0


# -- what can go wrong ---------------------------------------------------------------------------


def test_landing_and_prefill_of_one_worker_end_at_one_word() -> None:
    core = Pools()
    core.come()
    core.reserved()
    assert core.cancel() == [Send(D0, Cancel(request_id=R1))]
    assert core.n_requests == {}
    core.come("cmpl-2")
    core.reserved(rid="cmpl-2")
    only(core.decode_failed(rid="cmpl-2"), Resubmit)


def test_a_lost_decode_worker_takes_both_with_it_and_the_request_is_tried_again() -> None:
    core = Pools()
    core.join_decode("decode-1")
    core.come()
    core.reserved()
    only(core.lose("decode-0"), Resubmit)
    assert core.come("cmpl-1~2", attempt=2).worker_id == D1


def test_a_prefill_that_fails_there_is_tried_elsewhere() -> None:
    core = Pools()
    core.join_decode("decode-1", prefill_cost=HALF_AS_FAST)
    core.come()
    core.reserved()
    commands = core.prefill_failed("decode-0")
    assert commands[0] == Send(D0, Cancel(request_id=R1))
    assert isinstance(commands[1], Resubmit)
    assert core.come("cmpl-1~2", attempt=2).worker_id == D1


def test_limits_that_are_multiples_are_those_of_the_prefill_pool() -> None:
    core = Pools(admission="early", ttft_slo_multiple=0.5, tbt_slo_multiple=2.0)
    assert core.come(n_tokens=20).worker_id == D0  # 0.2 s, and 20 s would be alone at prefill-0
    core = Pools(admission="early", ttft_slo_multiple=0.005)
    core.come(n_tokens=20)
    assert core.decision.outcome == "refused"


# -- prompts of any length, in parts -------------------------------------------------------------


def a_hybrid_core(**fields: Any) -> Pools:
    return Pools(tokens=4096, local_prefill_step_s=0.36, **fields)


def test_a_long_prompt_is_predicted_in_parts_with_steps_between_them() -> None:
    core = a_hybrid_core()
    core.come("cmpl-1", n_tokens=200, prompt=1)  # 2 s on an idle worker
    chosen = core.come("cmpl-2", n_tokens=320)
    assert isinstance(chosen, LocalPrefillEstimate)
    # Ten parts of 32 tokens, each with a step of 0.04 s; behind the first one and half a step.
    assert chosen.prefill_s == pytest.approx(3.2 + 10 * 0.04)
    assert chosen.queue_s == pytest.approx(2.0 + 0.02)
    assert chosen.stalled_step_s == pytest.approx(0.36)


def test_a_worker_that_spaces_parts_takes_prompts_of_requests_with_limits() -> None:
    for tbt_s, local in ((0.1, True), (0.12, False), (0.0, False)):
        core = a_hybrid_core(local_prefill_tbt_s=tbt_s)
        core.come("cmpl-1", n_tokens=20, prompt=1, tbt_slo_s=0.11)
        chosen = core.come("cmpl-2", n_tokens=320, tbt_slo_s=0.11)
        assert isinstance(chosen, LocalPrefillEstimate) == local
        if local:
            # A part of 0.32 s is paid by steps of 0.04 s, 0.06 s each.
            assert chosen.stalled_step_s == pytest.approx(0.04 + 0.32 / 6)
            assert chosen.prefill_s == pytest.approx(3.2 + 10 * 0.04 + 9 * 5 * 0.04)


def test_new_blocks_go_to_the_kvstore_beside_the_worker_that_computes_them() -> None:
    core = a_hybrid_core(host="here")
    slow = PrefillCost(0.0, 1.0, 0.0)
    core.join("prefill-0", n_blocks=128, prefill_cost=slow, home_kvstore="kvstore-0")
    core.join("kvstore-2", n_blocks=128, host="here")
    core.hold("kvstore-2", a_request(), 0)
    core.come(n_tokens=100)
    start = message_to(core.reserved(), D0)
    assert start.store_in == KvstoreAddress(WorkerId("kvstore-2"), 1, "memory://kvstore-2/commands")
