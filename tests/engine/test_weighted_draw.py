"""Draws among few likely tokens are those of a full sort, in vocabularies of any size."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfmoon_engine.sampling.weighted_draw import Scores, draw_tokens, likely_tokens
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
    assume(top_k or top_p < 1)
    scores = scores_of(seed, n_vocab, spread, digits)
    weights = np.exp(scores - scores.max())
    found = likely_tokens(weights, top_k, top_p).tolist()
    expected = likely_by_sort(weights, top_k, top_p)
    # Sums in float32 may place the edge of the mass one token further or nearer.
    assert found == sorted(found)
    different = set(found) ^ set(expected)
    assert len(different) <= 1
    assert top_p < 1 or not different


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.builds(
                Sampling,
                temperature=st.sampled_from([1e-40, 0.3, 1.0, 1e6]),
                top_p=st.sampled_from([0.1, 0.9, 1.0]),
                top_k=st.sampled_from([0, 5, 4999, 10_000]),
                min_p=st.sampled_from([0.0, 0.1, 1.0]),
            ),
            st.integers(0, 5),
            st.floats(0, 1, exclude_max=True),
        ),
        min_size=1,
        max_size=70,
    )
)
def test_a_row_draws_the_same_in_any_group(rows: list[tuple[Sampling, int, float]]) -> None:
    scores = [scores_of(seed, 5000, 3.0, 6) for _, seed, _ in rows]
    samplings = [sampling for sampling, _, _ in rows]
    dice = [die for _, _, die in rows]
    together = draw_tokens(scores, samplings, dice)
    assert together == [
        draw_tokens([scores[i]], [samplings[i]], [dice[i]])[0] for i in range(len(rows))
    ]


def test_draws_over_many_blocks_follow_the_probabilities() -> None:
    n_vocab, n = 2000, 20_000
    scores = scores_of(1, n_vocab, 1.0, 6)
    dice = [(i + 0.5) / n for i in range(n)]
    for sampling in (Sampling(), Sampling(top_k=1999), Sampling(top_p=1 - 1e-9)):
        counts = Counter(draw_tokens([scores] * n, [sampling] * n, dice))
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
    n = len(extremes)
    assert set(draw_tokens([scores] * n, [sampling] * n, extremes)) <= allowed


def test_weights_that_are_no_numbers_draw_a_token_of_the_vocabulary() -> None:
    scores = np.full(700, np.nan, dtype=np.float32)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5)):
        (token,) = draw_tokens([scores], [sampling], [0.3])
        assert 0 <= token < 700
