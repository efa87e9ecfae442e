"""Quantiles of predictions' errors: what they bound, what they forget, and what they cost."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_scheduling.prediction.decaying_histogram import (
    HIGHEST_RATIO,
    LOWEST_RATIO,
    DecayingHistogram,
)
from halfmoon_scheduling.prediction.error_quantiles import HALF_LIFE_S, ErrorQuantiles

RATIOS = st.floats(LOWEST_RATIO, HIGHEST_RATIO)


def errors(q: float = 0.9) -> ErrorQuantiles:
    return ErrorQuantiles(q, of="of queue", prior=1.25)


@given(st.lists(RATIOS, min_size=1, max_size=60), st.floats(0.5, 0.99))
def test_a_quantile_is_the_ranked_ratio_up_to_the_width_of_a_bin(
    ratios: list[float], q: float
) -> None:
    histogram = DecayingHistogram(30.0)
    for ratio in ratios:
        histogram.observe(ratio, 0.0)
    histogram.check()
    n = len(ratios)
    rank = min(n, -int(-q * (n + 1) // 1))  # rounded up
    true = sorted(ratios)[rank - 1]
    assert true / 1.0201 <= histogram.quantile(q, 0.0) <= true * 1.0201


@given(st.lists(RATIOS, max_size=60), st.lists(st.floats(0.5, 0.99), min_size=2, max_size=5))
def test_a_larger_share_never_has_a_smaller_bound(ratios: list[float], shares: list[float]) -> None:
    histogram = DecayingHistogram(30.0)
    for i, ratio in enumerate(ratios):
        histogram.observe(ratio, float(i))
    bounds = [histogram.quantile(q, 60.0, prior=1.25, n_prior=20.0) for q in sorted(shares)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(bounds))


@given(st.lists(st.floats(0, 1e9), max_size=20))
def test_counts_halve_and_never_overflow(times: list[float]) -> None:
    histogram = DecayingHistogram(30.0)
    for now in sorted(times):
        histogram.observe(1.0, now)
    last = max(times, default=0.0)
    assert histogram.n(last + 30.0) == pytest.approx(histogram.n(last) / 2)
    assert histogram.n(last + 1e9) == pytest.approx(0.0)
    histogram.check()


def test_without_observations_the_prior_is_the_bound_and_a_few_decide_but_not_one() -> None:
    learnt = errors()
    bound = learnt.bound(1000, 2.0, 4.0, now=0.0)
    assert bound.bound_s == pytest.approx(4.0 * 1.25, rel=0.02)
    assert bound.n_observed == 0
    assert "prior of 1.25" in bound.bucket
    learnt.observe(1000, 2.0, 1.0, 9.0, now=0.0)
    assert learnt.bound(1000, 2.0, 1.0, now=0.0).ratio < 1.3
    for _ in range(3):
        learnt.observe(1000, 2.0, 1.0, 9.0, now=0.0)
    assert learnt.bound(1000, 2.0, 1.0, now=0.0).ratio > 3


@pytest.mark.random_seeds(3)
@pytest.mark.parametrize("q", [0.5, 0.9, 0.95])
def test_the_next_time_keeps_its_bound_with_the_probability_asked_for(q: float, seed: int) -> None:
    dice, learnt = random.Random(seed), errors(q)
    n, kept = 4000, 0
    for i in range(n):
        predicted_s = dice.uniform(0.1, 5.0)
        observed_s = predicted_s * dice.lognormvariate(0.1, 0.4)
        now = i / 10
        kept += observed_s <= learnt.bound(800, predicted_s, predicted_s, now).bound_s
        learnt.observe(800, predicted_s, predicted_s, observed_s, now)
    assert kept / n == pytest.approx(q, abs=0.03)


def test_prompts_and_queues_of_their_own_kind_are_learnt_apart() -> None:
    learnt = errors()
    for _ in range(40):
        learnt.observe(100, 0.01, 1.0, 3.0, now=0.0)
        learnt.observe(10_000, 2.0, 1.0, 1.1, now=0.0)
    assert learnt.bound(100, 0.01, 1.0, now=0.0).ratio == pytest.approx(3.0, rel=0.03)
    long = learnt.bound(10_000, 2.0, 1.0, now=0.0)
    assert long.ratio == pytest.approx(1.1, rel=0.03)
    assert "8,192 to 32,767 tokens" in long.bucket and "1.024 to 2.048 s of queue" in long.bucket


def test_an_unknown_length_takes_the_bound_of_its_queue_and_an_unknown_queue_a_shorter_one() -> (
    None
):
    learnt = errors()
    for _ in range(40):
        learnt.observe(100, 0.5, 1.0, 2.0, now=0.0)
    assert learnt.bound(5000, 0.5, 1.0, now=0.0).ratio == pytest.approx(2.0, rel=0.03)
    assert learnt.bound(5000, 30.0, 1.0, now=0.0).ratio == pytest.approx(2.0, rel=0.03)
    assert learnt.bound(5000, 0.01, 1.0, now=0.0).ratio == pytest.approx(1.25, rel=0.03)


def test_a_bucket_that_refuses_all_is_forgotten() -> None:
    """Only admitted requests are observed: else a bad minute would count for ever."""
    learnt = errors()
    for _ in range(200):
        learnt.observe(1000, 8.0, 1.0, 9.0, now=0.0)
    assert learnt.bound(1000, 8.0, 1.0, now=0.0).ratio > 8
    for i in range(200):
        learnt.observe(1000, 1.0, 1.0, 1.2, now=float(i))
    assert learnt.bound(1000, 8.0, 1.0, now=6 * HALF_LIFE_S).ratio == pytest.approx(1.2, rel=0.03)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9)),
        max_size=40,
    )
)
def test_memory_is_bounded_and_bounds_are_finite_whatever_is_observed(
    seen: list[tuple[int, float, float, float]],
) -> None:
    learnt = errors()
    for now, (n_tokens, time_s, predicted_s, observed_s) in enumerate(seen):
        learnt.observe(n_tokens, time_s, predicted_s, observed_s, float(now))
        bound = learnt.bound(n_tokens, time_s, predicted_s, float(now))
        assert 0 <= bound.bound_s <= predicted_s * HIGHEST_RATIO * 1.03
    learnt.check()
