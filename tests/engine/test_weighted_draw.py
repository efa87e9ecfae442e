"""Draws among few likely tokens are those of a full sort, in vocabularies of any size."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.sampling.exact_weights import Scores
from halfmoon_engine.sampling.weighted_draw import draw_token, likely_tokens, pick_weighted
from halfmoon_protocol.sampling import Sampling


def scores_of(seed: int, n_vocab: int, spread: float, digits: int) -> Scores:
    """Scores with ties: rounded to so many digits."""
    dice = np.random.default_rng(seed)
    return (spread * dice.standard_normal(n_vocab)).round(digits).astype(np.float32)


def likely_by_sort(weights: Scores, top_k: int, top_p: float) -> list[int]:
    """The definition: sort all, keep k, then the smallest set that reaches p of their mass."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = [token for token in order if weights[token] > 0][: top_k or None]
    total, mass, kept = sum(float(weights[token]) for token in order), 0.0, list[int]()
    for token in order:
        if kept and mass >= top_p * total and top_p < 1:
            break
        kept.append(token)
        mass += float(weights[token])
    return sorted(kept)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n_vocab=st.sampled_from([1, 2, 50, 511, 512, 513, 3000]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    digits=st.sampled_from([0, 1, 6]),
    top_k=st.sampled_from([0, 2, 7, 100, 2999]),
    top_p=st.sampled_from([1e-6, 0.1, 0.503, 0.957, 0.9991, 1.0]),
)
def test_likely_tokens_are_those_of_a_full_sort(
    seed: int, n_vocab: int, spread: float, digits: int, top_k: int, top_p: float
) -> None:
    scores = scores_of(seed, n_vocab, spread, digits)
    kept, weights = likely_tokens(scores, Sampling(top_k=top_k, top_p=top_p))
    found = list(range(n_vocab)) if kept is None else kept.tolist()
    assert len(weights) == len(found)
    assert found == sorted(found)
    weights = np.exp(scores - scores.max())
    expected = likely_by_sort(weights, top_k, top_p)
    different = {token for token in found if weights[token] > 0} ^ set(expected)
    # Sums in float32 may place the edge of the mass a little further or nearer.
    allowed = 1e-5 * float(weights.sum()) if top_p < 1 else 0.0
    assert sum(float(weights[token]) for token in different) <= allowed


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0]), min_size=1, max_size=9),
    n=st.sampled_from([1, 4000, 4096, 4097, 12_288, 13_000]),
    die=st.sampled_from([0.0, 0.25, 1 / 3, 0.999, float(np.nextafter(1.0, 0.0))]),
)
def test_a_weight_is_picked_where_sums_pass_it(sizes: list[float], n: int, die: float) -> None:
    weights = np.resize(np.array(sizes, dtype=np.float32), n)
    weights[n // 2] = 1.0
    place = pick_weighted(weights, die)
    mass = np.cumsum(weights, dtype=np.float64)
    assert weights[place] > 0
    assert mass[place] >= die * mass[-1] * (1 - 1e-6)
    assert mass[place] - weights[place] <= die * mass[-1] * (1 + 1e-6)


def test_draws_over_many_blocks_follow_the_probabilities() -> None:
    n_vocab, n = 5000, 4000
    scores = scores_of(1, n_vocab, 1.0, 6)
    dice = [(i + 0.5) / n for i in range(n)]
    for sampling in (Sampling(), Sampling(top_k=4999), Sampling(min_p=1e-9)):
        counts = Counter(draw_token(scores, sampling, die) for die in dice)
        probabilities = np.exp(scores.astype(np.float64))
        probabilities /= probabilities.sum()
        for token in range(n_vocab):
            assert abs(counts[token] - n * probabilities[token]) < 2


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.99)])
def test_a_token_that_must_not_come_never_comes(sampling: Sampling) -> None:
    dice = random.Random(3)
    scores = np.full(1500, -np.inf, dtype=np.float32)
    allowed = {5, 700, 1499}
    scores[list(allowed)] = [1.0, -50.0, 1.5]
    extremes = [0.0, np.nextafter(1.0, 0.0), *(dice.random() for _ in range(300))]
    assert {draw_token(scores, sampling, die) for die in extremes} <= allowed


def test_weights_that_are_no_numbers_draw_a_token_of_the_vocabulary() -> None:
    scores = np.full(700, np.nan, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5)):
        assert 0 <= draw_token(scores, sampling, 0.3) < 700
