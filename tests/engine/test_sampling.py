"""How tokens are chosen: alone as in any batch, by the parameters' known meanings, as by a sort."""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_engine.interface import Draw, Run
from halfmoon_engine.native.extension import native_extension
from halfmoon_engine.sampling.exact_weights import Scores, exact_weights
from halfmoon_engine.sampling.sampler import choose_tokens, uniform_draw
from halfmoon_engine.sampling.weighted_draw import draw_token, likely_tokens, pick_weighted
from halfmoon_protocol import schema
from halfmoon_protocol.sampling import Sampling
from tests.engine.driver import Driver, EngineOf

VOCAB = 50


def logits_of(seed: int, n_rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(n_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


Choose = Callable[..., list[int]]
Drawn = Callable[..., Counter[int]]


@pytest.fixture(scope="module")
def choose(native: Any) -> Choose:
    """`choose_tokens`, with and without the extension."""
    return partial(choose_tokens, native=native_extension(native))


@pytest.fixture(scope="module")
def drawn(choose: Choose) -> Drawn:
    """Draws of one distribution at many positions."""

    def draws(logits: torch.Tensor, sampling: Sampling, n: int = 4000) -> Counter[int]:
        rows = logits.expand(n, -1)
        return Counter(choose(rows, [Draw(sampling)] * n, range(n)))

    return draws


def test_golden_draws_are_what_engines_choose(choose: Choose) -> None:
    golden = json.loads((schema.HOME / "golden" / "draws.json").read_text())
    for case in golden["dice"]:
        assert uniform_draw(int(case["seed"]), case["position"]) == case["die"]
    for case in golden["weights"]:
        scores = np.array([case["score"]], dtype=np.float32)
        (weight,) = exact_weights(scores, np.float32(case["highest"]), case["temperature"])
        assert float(weight) * 2**33 == case["weight_times_2_33"]
    choices = golden["choices"]
    for case in choices["cases"]:
        n = len(case["tokens"])
        sampling = msgspec.convert(case["sampling"], Sampling)
        draw = Draw(sampling, choices["history"], choices["n_prompt"])
        rows = torch.tensor(choices["logits"]).expand(n, -1)
        first = choices["first_position"]
        assert choose(rows, [draw] * n, range(first, first + n)) == case["tokens"], sampling


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(), Sampling(temperature=3.0, top_k=3)]
)
def test_masked_tokens_are_chosen_as_impossible_ones(choose: Choose, sampling: Sampling) -> None:
    logits = logits_of(5).expand(200, -1)
    masked = [int(token) for token in logits[0].topk(4).indices]
    impossible = logits.clone()
    impossible[:, masked] = -torch.inf
    draw = Draw(sampling, masked=(*masked, VOCAB, 2**31))
    chosen = choose(logits, [draw] * 200, range(200))
    assert chosen == choose(impossible, [Draw(sampling)] * 200, range(200))
    assert not set(chosen) & set(masked)


def test_a_masked_token_comes_where_grammar_or_vocabulary_leave_no_other(choose: Choose) -> None:
    grammar = np.zeros(VOCAB, dtype=np.bool_)
    grammar[[7, 9]] = True
    rows = logits_of(6).expand(3, -1)
    draws = [Draw(Sampling(seed=1), masked=each) for each in ((7,), (7, 9), range(VOCAB))]
    tokens = choose(rows, draws, range(3), {0: grammar, 1: grammar})
    assert tokens[0] == 9
    assert tokens[1] in (7, 9)
    assert tokens[2] == choose(rows[:1], [Draw(Sampling(seed=1))], [2])[0]
    assert list(np.flatnonzero(grammar)) == [7, 9], "the mask is of other rows, too"


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(samplings, st.integers(0, 10**6)), min_size=1, max_size=6))
def test_a_draw_is_the_same_in_any_batch(choose: Choose, rows: list[tuple[Sampling, int]]) -> None:
    logits = logits_of(1, len(rows))
    draws = [Draw(sampling, (1, 2, 2, 3), 1) for sampling, _ in rows]
    positions = [position for _, position in rows]
    together = choose(logits, draws, positions)
    alone = [choose(logits[i : i + 1], [draw], [positions[i]])[0] for i, draw in enumerate(draws)]
    assert together == alone


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=0.0), 1),
        (Sampling(temperature=1e-6), 1),
        (Sampling(top_k=1), 1),
        (Sampling(top_p=1e-9), 1),
        (Sampling(min_p=1.0), 1),
        (Sampling(top_k=3, temperature=2.0), 3),
        (Sampling(top_p=0.79), 2),
        (Sampling(top_p=0.81), 3),
        (Sampling(top_p=0.49), 1),
        (Sampling(min_p=0.25), 3),
        (Sampling(min_p=0.35), 2),
        # Of 0.5 and 0.3 the first has 0.625 of the mass.
        (Sampling(top_k=2, top_p=0.6), 1),
        (Sampling(top_k=2, top_p=0.65), 2),
    ],
)
def test_only_tokens_within_bounds_are_drawn(drawn: Drawn, sampling: Sampling, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert set(drawn(logits, sampling)) == set(range(kept))


def test_a_request_that_is_placed_again_goes_on_with_the_same_tokens(engine_of: EngineOf) -> None:
    engine = engine_of("llama")
    driver = Driver(engine, 400)
    sampling = Sampling(temperature=1.0, top_p=0.9, presence_penalty=0.4, seed=77)
    prompt = list(range(10, 60))
    once = driver.generate(prompt, 30, sampling=sampling)
    assert len(set(once)) > 5

    resumed = driver.pages_for(80)
    draw = Draw(sampling, (*prompt, *once[:12]), len(prompt))
    other = Run([1, 2, 3], 0, driver.pages_for(3), Draw(Sampling(seed=5)))
    token, _ = engine.forward([Run([*prompt, *once[:12]], 0, resumed, draw), other])
    assert token == once[12]


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
