"""A step here takes a second for each request and a millisecond for each token of context."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import DecodeCost, DecodeLoad
from halfmoon_scheduling.cluster.decode_pool import DecodePool
from halfmoon_scheduling.placement.estimates import DecodeCandidate
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.decode_forecast import DecodeStay
from halfmoon_scheduling.prediction.sliding_quantile import WINDOW
from halfmoon_testing.scheduling_inputs import a_worker
from tests.scheduling.core import decode_load

D0, D1 = WorkerId("decode-0"), WorkerId("decode-1")
ASKED, LANDING, RUNNING = RequestId("asked"), RequestId("landing"), RequestId("running")
COST = DecodeCost(d0_s=0.0, d1_s=1.0, d2_s=0.001)


def a_pool(*workers: str, decode_time_s: float | None = None) -> DecodePool:
    pool = DecodePool(CostModel(), decode_time_s=decode_time_s, counts_running=True)
    for worker in workers or ("decode-0",):
        pool.join(a_worker(worker, decode_cost=COST, n_blocks=100))
    return pool


def with_one_of_each() -> DecodePool:
    """3 pages and 100 tokens asked for, 10 and 200 landing, 20 and 400 running."""
    pool = a_pool()
    pool.hold(D0, ASKED, 3, DecodeStay(100, 50.0))
    pool.hold(D0, LANDING, 10, DecodeStay(200, 40.0))
    pool.on_landing_reserved(D0, LANDING)
    pool.hold(D0, RUNNING, 20, DecodeStay(400, 30.0))
    pool.on_landing_reserved(D0, RUNNING)
    pool.start(D0, RUNNING, 31.0)
    pool.check()
    return pool


def load(n_running: int, n_reserved: int, context_tokens: int, free_pages: int) -> DecodeLoad:
    # Without steps, so that nothing is learnt from it.
    more = {"n_running": n_running, "n_reserved": n_reserved, "context_tokens": context_tokens}
    return decode_load(free_pages, n_pages=100, **more)


def candidate(pool: DecodePool) -> DecodeCandidate:
    (found,) = pool.candidates([a_worker("decode-0")], 10)
    pool.check()
    return found


def test_what_is_promised_counts_until_it_is_let_go() -> None:
    pool = with_one_of_each()
    assert (candidate(pool).n_requests, candidate(pool).free_pages) == (3, 67)
    assert candidate(pool).step_s == pytest.approx(4 + 0.7)
    assert pool.running_tbt_s(D0, 50) == pytest.approx(2 + 0.45)
    pool.release(D0, ASKED)
    pool.release(D0, RUNNING)
    pool.release(D0, RequestId("never there"))
    assert (candidate(pool).n_requests, candidate(pool).free_pages) == (1, 90)
    assert pool.running_tbt_s(D0, 50) == pytest.approx(1 + 0.05)
    assert pool.unloaded_tbt_s(D0, 50) == pytest.approx(1 + 0.05)


def test_a_load_is_taken_with_what_its_sender_can_not_know_of() -> None:
    pool = with_one_of_each()
    # Another conductor runs one there, and reserved one more.
    pool.on_load(D0, load(n_running=2, n_reserved=2, context_tokens=450, free_pages=55))
    assert (candidate(pool).n_requests, candidate(pool).free_pages) == (5, 52)
    assert candidate(pool).step_s == pytest.approx(6 + 0.75)
    assert pool.running_tbt_s(D0, 0) == pytest.approx(3 + 0.45)


def test_a_load_from_before_a_start_does_not_hide_it_and_nothing_else_is_taken_from_it() -> None:
    pool = with_one_of_each()
    pool.on_load(D0, load(n_running=0, n_reserved=2, context_tokens=0, free_pages=70))
    assert pool.running_tbt_s(D0, 0) == pytest.approx(2 + 0.4)
    pool.on_load(D0, load(n_running=0, n_reserved=0, context_tokens=0, free_pages=100))
    for request_id in (ASKED, LANDING, RUNNING):
        pool.release(D0, request_id)
    assert (candidate(pool).n_requests, candidate(pool).free_pages) == (0, 100)
    assert candidate(pool).step_s == pool.running_tbt_s(D0, 0) == 1


def test_who_said_it_is_full_gets_nothing_until_a_load_or_a_release_or_the_time() -> None:
    for hint in ("load", "release", "time"):
        pool = with_one_of_each()
        pool.on_load(D0, load(1, 1, 400, 70))
        pool.on_refused(D0, ASKED, 70.0)
        pool.on_tick(69.9)
        pool.on_load(D0, load(1, 1, 400, 70))  # no more room than by its last report
        assert pool.candidates([a_worker("decode-0")], 10) == []
        pool.release(D0, ASKED)  # it never had the pages of that one
        assert pool.candidates([a_worker("decode-0")], 10) == []
        if hint == "load":
            pool.on_load(D0, load(1, 1, 400, 71))
        elif hint == "release":
            pool.release(D0, LANDING)
        else:
            pool.on_tick(70.0)
        assert len(pool.candidates([a_worker("decode-0")], 10)) == 1


def test_who_refused_a_request_may_be_asked_for_a_smaller_one_once_it_has_reported() -> None:
    pool = a_pool()
    pool.on_load(D0, load(60, 0, 400, 70))
    pool.hold(D0, ASKED, 20, DecodeStay(100, 50.0), n_wanted=21)
    pool.on_refused(D0, ASKED, 70.0)
    pool.release(D0, ASKED)
    assert pool.take_workers_with_more_room() == {D0}
    assert not pool.has_room(D0, 1)
    pool.on_load(D0, load(60, 0, 400, 70))
    assert pool.take_workers_with_more_room() == {D0}
    assert pool.has_room(D0, 20)
    assert not pool.has_room(D0, 21)


def test_a_worker_that_goes_takes_all_claims_on_it_along() -> None:
    pool = with_one_of_each()
    assert pool.requests(D0) == {ASKED, LANDING, RUNNING}
    pool.leave(D0)
    pool.check()
    assert (D0 in pool, list(pool)) == (False, [])
    pool.release(D0, ASKED)
    pool.on_load(D0, load(0, 0, 0, 0))


def test_loads_are_the_steps_of_what_runs_and_nothing_where_nothing_does() -> None:
    pool = a_pool("decode-0", "decode-1")
    pool.hold(D1, RUNNING, 20, DecodeStay(400, 30.0))
    assert pool.loads_s() == {D0: 0.0, D1: 0.0}
    pool.start(D1, RUNNING, 31.0)
    assert pool.loads_s() == {D0: 0.0, D1: pytest.approx(1.4)}
    assert pool.decoded_for(D1, RUNNING, 35.0) == 4.0


def test_the_uniform_forecast_is_the_mean_over_the_workers() -> None:
    pool = a_pool("decode-0", "decode-1", decode_time_s=100.0)
    for worker, start_s in ((D0, 31.0), (D1, 35.0)):
        pool.hold(worker, RequestId(worker), 20, DecodeStay(400, 30.0))
        pool.start(worker, RequestId(worker), start_s)
    pool.hold(D1, LANDING, 10, DecodeStay(200, 40.0))
    # At 39 two run, at 40 three, at 131 the first is gone; and the one that asks.
    assert pool.uniform_tbt_s(100, 39.0, 36.0) == pytest.approx((3 + 0.9) / 2)
    assert pool.uniform_tbt_s(100, 40.0, 36.0) == pytest.approx((4 + 1.1) / 2)
    assert pool.uniform_tbt_s(100, 131.0, 36.0) == pytest.approx((3 + 0.7) / 2)


def test_the_mean_of_the_pool_follows_all_that_happens_to_its_workers() -> None:
    pool = a_pool("decode-0", "decode-1")
    assert pool.mean_tbt_s(100) == pytest.approx(1.1 / 2)
    pool.hold(D0, RUNNING, 20, DecodeStay(400, 30.0))
    assert pool.mean_tbt_s(100) == pytest.approx(1.1 / 2)  # it does not run yet
    pool.start(D0, RUNNING, 31.0)
    assert pool.mean_tbt_s(100) == pytest.approx((1.4 + 1.1) / 2)
    pool.on_load(D1, load(n_running=2, n_reserved=0, context_tokens=500, free_pages=50))
    assert pool.mean_tbt_s(100) == pytest.approx((1.4 + 2.5 + 1.1) / 2)
    pool.release(D0, RUNNING)
    assert pool.mean_tbt_s(100) == pytest.approx((2.5 + 1.1) / 2)
    pool.leave(D1)
    assert pool.mean_tbt_s(100) == pytest.approx(1.1)


def test_the_uniform_time_is_the_mean_of_those_seen_unless_it_is_given() -> None:
    pool = a_pool()
    assert pool.decode_time_s(0.0) == float("inf")
    for seconds in range(1, 101):
        pool.observe_decode_time(float(seconds))
    assert pool.decode_time_s(0.0) == pytest.approx(50.5)
    fixed = a_pool(decode_time_s=7.0)
    fixed.observe_decode_time(100.0)
    assert fixed.decode_time_s(0.0) == 7.0


@pytest.mark.parametrize("counts_running", [True, False])
def test_while_few_are_over_those_that_run_count_in_the_uniform_time_where_told_so(
    counts_running: bool,
) -> None:
    pool = DecodePool(CostModel(), counts_running=counts_running)
    pool.join(a_worker("decode-0", decode_cost=COST, n_blocks=100))
    pool.hold(D0, RUNNING, 20, DecodeStay(400, 30.0))
    pool.start(D0, RUNNING, 31.0)
    pool.observe_decode_time(2.0)
    assert pool.decode_time_s(41.0) == pytest.approx(12 if counts_running else 2, rel=0.01)
    for _ in range(WINDOW):
        pool.observe_decode_time(2.0)
    assert pool.decode_time_s(41.0) == pytest.approx(2.0)
    pool.release(D0, RUNNING)
    pool.check()


@given(st.lists(st.floats(0.1, 1000.0), min_size=2, max_size=60))
def test_the_first_ends_of_answers_that_begin_together_do_not_look_like_all(
    answers_s: list[float],
) -> None:
    """Short ones are over first: their mean alone is too small."""
    pool = a_pool()
    for i in range(len(answers_s)):
        pool.hold(D0, RequestId(f"r{i}"), 1, DecodeStay(1, 0.0))
        pool.start(D0, RequestId(f"r{i}"), 0.0)
    over: list[float] = []
    for seconds, i in sorted((seconds, i) for i, seconds in enumerate(answers_s)):
        pool.observe_decode_time(seconds)
        pool.release(D0, RequestId(f"r{i}"))
        pool.check()
        over.append(seconds)
        mean_s = sum(over) / len(over)
        left_s = (len(answers_s) - len(over)) * seconds
        allowed_s = mean_s + left_s / len(over)
        assert mean_s * (1 - 1e-6) <= pool.decode_time_s(seconds) <= allowed_s * (1 + 1e-6)
        assert pool.decode_time_s(seconds) >= 0.85 * allowed_s
    assert pool.decode_time_s(over[-1]) == pytest.approx(sum(answers_s) / len(answers_s))
