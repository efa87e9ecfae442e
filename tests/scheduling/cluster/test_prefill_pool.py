"""A prefill here takes a second for each token that is computed."""

from typing import Any

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost, PrefillLoad
from halfmoon_scheduling.cluster.prefill_pool import PrefillPool
from halfmoon_scheduling.placement.estimates import Estimate, PlacementRequest
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_testing.scheduling_inputs import a_worker

P0, K0 = WorkerId("prefill-0"), WorkerId("kvstore-0")
A, B, C = (RequestId(name) for name in "abc")
COST = PrefillCost(c0_s=0.0, c1_s=1.0, c2_s=0.0)


def a_pool() -> PrefillPool:
    pool = PrefillPool(CostModel())
    pool.join(a_worker("prefill-0", prefill_cost=COST))
    return pool


def plan(pool: PrefillPool, rid: RequestId, seconds: int, now: float = 0.0, **cached: Any) -> None:
    fields: dict[str, Any] = {"source": None, "n_blocks": 0, "transfer_blocks": 0, **cached}
    chosen = Estimate(
        worker_id=P0,
        home=None,
        local_blocks=0,
        queue_s=0.0,
        transfer_s=0.0,
        prefill_s=float(seconds),
        ttft_s=float(seconds),
        **fields,
    )
    n_tokens = seconds + 16 * fields["n_blocks"]
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
