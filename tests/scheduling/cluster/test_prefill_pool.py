"""A prefill here takes a second for each token that is computed."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost, PrefillLoad
from halfmoon_scheduling.cluster.prefill_pool import PrefillPool
from halfmoon_scheduling.placement.estimates import Estimate, PlacementRequest
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_testing.scheduling_inputs import a_worker

P0, K0 = WorkerId("prefill-0"), WorkerId("kvstore-0")
A, B, C = (RequestId(name) for name in "abc")
COST = PrefillCost(c0_s=0.0, c1_s=1.0, c2_s=0.0)


def a_pool() -> PrefillPool:
    pool = PrefillPool(CostModel())
    pool.join(a_worker("prefill-0", prefill_cost=COST))
    return pool


def an_estimate(worker: WorkerId = P0, kind: Any = Estimate, **fields: Any) -> Any:
    numbers = dict.fromkeys(("queue_s", "transfer_s", "prefill_s", "ttft_s"), 0.0)
    blocks = dict.fromkeys(("local_blocks", "n_blocks", "transfer_blocks"), 0)
    return kind(worker_id=worker, **{"home": None, "source": None, **blocks, **numbers, **fields})


def plan(pool: PrefillPool, rid: RequestId, seconds: int, now: float = 0.0, **cached: Any) -> None:
    chosen = an_estimate(prefill_s=float(seconds), ttft_s=float(seconds), **cached)
    n_tokens = seconds + 16 * chosen.n_blocks
    pool.plan(chosen, PlacementRequest(rid, n_tokens, 1, block_size=16, block_bytes=64), now)
    pool.check()


def release(pool: PrefillPool, rid: RequestId, now: float) -> None:
    pool.release(P0, rid, now)
    pool.check()


def queue_s(pool: PrefillPool, now: float) -> float:
    """As placement sees it, which is the same as the metrics do."""
    (candidate,) = pool.candidates([a_worker("prefill-0")], {P0: None}, now)
    assert pool.queues_s(now) == {P0: pytest.approx(candidate.queue_s)}
    return candidate.queue_s


def load(queued_tokens: int) -> PrefillLoad:
    return PrefillLoad(n_queued=1, queued_tokens=queued_tokens, free_pages=9, n_pages=9)


def test_a_queue_is_what_is_planned_less_what_has_run() -> None:
    pool = a_pool()
    assert queue_s(pool, 0.0) == 0.0
    plan(pool, A, 10)
    plan(pool, B, 20)
    plan(pool, C, 40)
    assert queue_s(pool, 4.0) == 66.0
    assert queue_s(pool, 15.0) == 60.0  # the first one is late: nothing else has run
    release(pool, A, 15.0)
    assert queue_s(pool, 20.0) == 55.0


def test_who_leaves_out_of_turn_shortens_the_queue_by_its_own_time() -> None:
    pool = a_pool()
    plan(pool, A, 10)
    plan(pool, B, 20)
    plan(pool, C, 40)
    release(pool, B, 4.0)
    assert queue_s(pool, 4.0) == 46.0
    release(pool, C, 4.0)
    assert queue_s(pool, 4.0) == 6.0
    release(pool, A, 4.0)
    release(pool, A, 4.0)
    assert queue_s(pool, 4.0) == 0.0


def test_a_changed_record_changes_the_cost_and_keeps_the_queue() -> None:
    pool = a_pool()
    plan(pool, A, 10)
    pool.join(a_worker("prefill-0", prefill_cost=PrefillCost(c0_s=0.0, c1_s=2.0)))
    assert queue_s(pool, 0.0) == 10.0
    assert pool.requests(P0) == {A}
    assert pool.unloaded_s(P0, 50) == 100.0


def test_a_worker_that_goes_takes_its_queue_along() -> None:
    pool = a_pool()
    plan(pool, A, 10, source=K0, n_blocks=2, transfer_blocks=1)
    assert pool.transfers == {K0: 1}
    pool.leave(P0)
    pool.check()
    assert (P0 in pool, len(pool), pool.transfers, pool.queues_s(0.0)) == (False, 0, {}, {})
    pool.release(P0, A, 1.0)
    pool.on_load(P0, load(7))


def test_what_is_queued_beyond_our_own_is_other_conductors() -> None:
    pool = a_pool()
    plan(pool, A, 10, n_blocks=2)  # 42 tokens, of which 10 are computed
    pool.on_load(P0, load(25))
    assert queue_s(pool, 4.0) == 6.0 + 15.0
    pool.on_load(P0, load(8))  # it has computed two of ours, and there are no others
    assert queue_s(pool, 4.0) == 6.0


def test_a_prefill_keeps_its_worker_busy_from_its_start_or_from_the_end_of_the_one_before() -> None:
    pool = a_pool()
    plan(pool, A, 10)
    pool.start(P0, A, 3.0)
    assert pool.busy_s(P0, A, 13.0) == 10.0
    plan(pool, B, 10)
    pool.start(P0, B, 4.0)
    release(pool, A, 13.0)
    assert pool.busy_s(P0, B, 23.0) == 10.0
    assert pool.busy_s(P0, B, 13.0) == 0.0
    release(pool, B, 23.0)
    plan(pool, C, 10)
    assert pool.busy_s(P0, C, 24.0) == 0.0  # the worker was not told of it
    pool.start(P0, C, 50.0)
    assert pool.busy_s(P0, C, 55.0) == 5.0


def a_running_pool() -> PrefillPool:
    """Return a pool whose worker computes `A` since 10 s, while `B` waits behind it."""
    pool = a_pool()
    for rid in (A, B):
        plan(pool, rid, 10)
        pool.start(P0, rid, 10.0)
    return pool


@pytest.mark.parametrize(
    "gone", ["refused by decode", "planned before it", "cancelled in the queue"]
)
def test_one_that_leaves_takes_no_seconds_from_the_prefill_under_way(gone: str) -> None:
    pool, under_way = a_running_pool(), A
    if gone == "refused by decode":  # its worker was never told of it
        plan(pool, C, 10)
        release(pool, C, 19.0)
    elif gone == "cancelled in the queue":
        release(pool, B, 19.0)
    else:
        pool, under_way = a_pool(), B
        plan(pool, A, 10)
        plan(pool, B, 10)
        pool.start(P0, B, 10.0)
        release(pool, A, 19.0)
    pool.on_answer(P0, 20.0)
    assert pool.busy_s(P0, under_way, 20.0) == 10.0


def test_the_seconds_of_a_cancelled_prefill_are_not_those_of_the_next_one() -> None:
    pool = a_running_pool()
    release(pool, A, 19.0)
    pool.on_answer(P0, 24.0)
    assert pool.busy_s(P0, B, 24.0) == 5.0


def test_a_prefill_that_is_done_before_its_turn_kept_its_worker_busy() -> None:
    pool = a_running_pool()
    pool.on_answer(P0, 14.0)
    assert pool.busy_s(P0, B, 14.0) == 4.0
    release(pool, B, 14.0)
    assert pool.busy_s(P0, A, 24.0) == 10.0


def test_the_stages_of_a_prompt_kept_all_their_workers_busy() -> None:
    pool, other = a_pool(), WorkerId("prefill-1")
    pool.join(a_worker("prefill-1", prefill_cost=COST))
    members: dict[str, Any] = {"group": "g", "members": (P0, other), "stage_s": (5.0, 5.0)}
    group = an_estimate(kind=GroupEstimate, prefill_s=5.0, ttft_s=5.0, **members)
    pool.plan(group, PlacementRequest(A, 10, 1, block_size=16, block_bytes=64), 0.0)
    pool.start(P0, A, 0.0)
    alone = an_estimate(other, queue_s=5.0, prefill_s=4.0, ttft_s=9.0)
    pool.plan(alone, PlacementRequest(B, 4, 1, block_size=16, block_bytes=64), 1.0)
    pool.start(other, B, 1.0)
    pool.on_answer(P0, 5.0)
    release(pool, A, 5.0)
    assert pool.busy_s(other, B, 9.0) == 4.0
