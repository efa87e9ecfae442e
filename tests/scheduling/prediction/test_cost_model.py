import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_scheduling.prediction.cost_model import (
    MAX_SCALE,
    MIN_SCALE,
    CostModel,
)

P, D, K = WorkerId("prefill-0"), WorkerId("decode-0"), WorkerId("kvstore-0")
COST = PrefillCost(c0_s=1.0, c1_s=0.1, c2_s=0.01)


def test_costs_are_sums_by_tokens_pairs_requests_and_bytes() -> None:
    costs = CostModel(prior_bandwidth=100.0)
    assert costs.prefill_s(P, COST, 10, 0) == pytest.approx(1 + 0.1 * 10 + 0.01 * 100)
    assert costs.prefill_s(P, COST, 10, 4) == pytest.approx(1 + 0.1 * 6 + 0.01 * (100 - 16))
    step = DecodeCost(d0_s=0.01, d1_s=0.002, d2_s=0.0001)
    assert costs.step_s(D, step, 3, 100) == pytest.approx(0.01 + 0.006 + 0.01)
    assert costs.transfer_s(K, P, 300, 0) == pytest.approx(3)
    assert costs.transfer_s(K, P, 300, 2) == pytest.approx(9)  # shared with those under way


@pytest.mark.parametrize(
    ("factor", "n_times", "scale"),
    [(2, 100, 2), (1000, 1, 0.9 + 0.1 * MAX_SCALE), (1e6, 100, MAX_SCALE), (1e-6, 100, MIN_SCALE)],
    ids=["by what is seen", "little by one odd one", "up to a bound", "down to a bound"],
)
def test_predictions_move_for_that_worker_alone(factor: float, n_times: int, scale: float) -> None:
    costs = CostModel()
    before = costs.prefill_s(P, COST, 10, 0)
    for _ in range(n_times):
        costs.observe_prefill(P, COST, 10, 0, factor * before)
    assert costs.prefill_s(P, COST, 10, 0) == pytest.approx(scale * before, rel=1e-3)
    assert costs.prefill_s(WorkerId("prefill-1"), COST, 10, 0) == pytest.approx(before)
    costs.check()


LINEAR = PrefillCost(c0_s=0.0, c1_s=0.001, c2_s=0.0)


def test_a_long_prefill_says_more_than_a_short_one() -> None:
    after: dict[int, float] = {}
    for n_last in (100, 1000, 10_000):
        costs = CostModel()
        for _ in range(20):
            costs.observe_prefill(P, LINEAR, 1000, 0, 1.0)
        costs.observe_prefill(P, LINEAR, n_last, 0, 2.0 * n_last * 0.001)
        after[n_last] = costs.scale(P) - 1.0
    assert after[1000] == pytest.approx(0.1)  # one of ten like it
    assert after[100] == pytest.approx(0.01, rel=0.1)
    assert after[10_000] > 4 * after[1000]


@given(
    st.lists(
        st.tuples(st.integers(1, 4000), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8)),
        min_size=1,
        max_size=20,
    )
)
def test_how_many_prompts_share_a_pass_does_not_matter(
    passes: list[tuple[int, list[float]]],
) -> None:
    """Play passes of so many tokens as one prompt, and as several with these shares of them."""
    single, shared = CostModel(), CostModel()
    for model in (single, shared):
        model.observe_prefill(P, LINEAR, 1000, 0, 1.0)
    for n, shares in passes:
        parts = [max(1, round(n * share / sum(shares))) for share in shares]
        seconds = 1.5 * sum(parts) * 0.001
        single.observe_prefill(P, LINEAR, sum(parts), 0, seconds)
        for i, part in enumerate(parts):
            shared.observe_prefill(P, LINEAR, part, 0, 0.0 if i else seconds)
        assert shared.scale(P) == pytest.approx(single.scale(P))


@given(
    st.lists(st.tuples(st.integers(2000, 20_000), st.integers(0, 30)), min_size=10, max_size=30),
    st.floats(0.5, 2.0),
    st.integers(1024, 4096),
)
def test_a_correction_stays_near_the_truth_while_passes_cut_prompts_anywhere(
    bursts: list[tuple[int, int]], factor: float, pass_tokens: int
) -> None:
    """Play a worker that is never idle, whose passes hold so many tokens of its queue.

    Each long prompt has so many short ones behind it.
    """
    prompts = [n for long, n_short in bursts for n in (long, *[30] * n_short)]
    costs = CostModel()
    for _ in range(10):
        costs.observe_prefill(P, LINEAR, 10_000, 0, factor * 10.0)
    start = costs.scale(P)
    low, high = min(start, factor), max(start, factor)
    end_tokens = last_end_s = 0.0
    for n in prompts:
        end_tokens += n
        ends_s = -(-end_tokens // pass_tokens) * pass_tokens * 0.001 * factor
        costs.observe_prefill(P, LINEAR, n, 0, ends_s - last_end_s)
        last_end_s = ends_s
        assert 0.9 * low <= costs.scale(P) <= 1.1 * high


def test_the_rest_of_a_pass_that_began_with_an_unknown_prefill_says_nothing() -> None:
    costs = CostModel()
    costs.skip_prefill(P)  # of a worker that nothing is known of
    costs.observe_prefill(P, LINEAR, 1000, 0, 1.0)
    costs.skip_prefill(P)
    for _ in range(9):
        costs.observe_prefill(P, LINEAR, 1000, 0, 0.0)
    assert costs.scale(P) == 1.0
    for _ in range(20):
        costs.observe_prefill(P, LINEAR, 1000, 0, 2.0)
    assert costs.scale(P) > 1.8


def test_steps_move_towards_what_is_seen_of_them() -> None:
    costs = CostModel()
    cost = DecodeCost(d0_s=0.01, d1_s=0.002, d2_s=0.0001)
    assert costs.per_token_s(D, cost) == 0.0001
    costs.observe_step(D, cost, 3, 100, 0.0)  # no step yet: says nothing
    assert costs.step_s(D, cost, 3, 100) == pytest.approx(0.026)
    costs.observe_step(D, cost, 3, 100, 0.052)  # twice as long
    assert costs.step_s(D, cost, 3, 100) == pytest.approx(1.2 * 0.026)
    assert costs.step_s(D, cost, 5, 10) == pytest.approx(1.2 * 0.021)
    assert costs.per_token_s(D, cost) == pytest.approx(1.2 * 0.0001)
    costs.forget(D)
    assert costs.step_s(D, cost, 3, 100) == pytest.approx(0.026)


@pytest.mark.parametrize(
    ("n_bytes", "seconds", "n_active", "learnt"),
    [(10_000_000, 1.0, 1, 20e6), (100, 1.0, 0, 1e6), (10_000_000, 0.0, 0, 1e6)],
    ids=["of one transfer alone", "not by a small one", "not by one without time"],
)
def test_bandwidth_is_learnt(n_bytes: int, seconds: float, n_active: int, learnt: float) -> None:
    costs = CostModel(prior_bandwidth=1e6)
    for _ in range(100):
        costs.observe_transfer(K, P, n_bytes, seconds=seconds, n_active=n_active)
    assert costs.bandwidth(K, P) == pytest.approx(learnt, rel=1e-3)
    costs.forget(K)
    assert costs.bandwidth(K, P) == 1e6


def test_bandwidth_is_learnt_per_path_and_another_reader_starts_from_the_sources() -> None:
    costs = CostModel(prior_bandwidth=1e6)
    near, far, new = WorkerId("prefill-1"), WorkerId("prefill-2"), WorkerId("prefill-3")
    for _ in range(100):
        costs.observe_transfer(K, near, 40_000_000, seconds=1.0, n_active=0)
        costs.observe_transfer(K, far, 10_000_000, seconds=1.0, n_active=0)
    assert costs.bandwidth(K, near) == pytest.approx(40e6, rel=1e-3)
    assert costs.bandwidth(K, far) == pytest.approx(10e6, rel=1e-3)
    assert 10e6 < costs.bandwidth(K, new) < 40e6
    assert costs.bandwidth(WorkerId("kvstore-9"), near) == 1e6
    costs.forget(near)
    assert costs.bandwidth(K, near) == costs.bandwidth(K, new)
    costs.check()
