"""How tokens are chosen: alone as in any batch, by the parameters' known meanings."""

import json
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
from halfmoon_engine.sampling.exact_weights import exact_weights
from halfmoon_engine.sampling.sampler import choose_tokens, uniform_draw
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


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**40))
def test_dice_are_those_of_numpys_philox(seed: int, position: int) -> None:
    generator = np.random.Philox(key=np.array([seed, position], dtype=np.uint64))
    assert uniform_draw(seed, position) == (int(generator.random_raw()) >> 11) * 2.0**-53


def test_temperature_zero_and_top_k_one_are_greedy(drawn: Drawn) -> None:
    logits = logits_of(3)
    best = int(logits[0].argmax())
    for sampling in (
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_k=1, seed=4),
        Sampling(temperature=1e-6, seed=4),
        Sampling(temperature=1.0, top_p=1e-9, seed=4),
        Sampling(temperature=1.0, min_p=1.0, seed=4),
    ):
        assert set(drawn(logits, sampling, 50)) == {best}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
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


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        # Scores 2, 1.9, -1, -1.1 with history [0 | 2, 2]: token 0 in the prompt, 2 in the output.
        (Sampling(temperature=0.0, repetition_penalty=2.0), [1.0, 1.9, -2.0, -1.1]),
        (Sampling(temperature=0.0, presence_penalty=0.5), [2.0, 1.9, -1.5, -1.1]),
        (Sampling(temperature=0.0, frequency_penalty=0.5), [2.0, 1.9, -2.0, -1.1]),
        (Sampling(temperature=0.0, frequency_penalty=-2.0), [2.0, 1.9, 3.0, -1.1]),
    ],
)
def test_penalties_look_at_prompt_and_output_as_they_should(
    choose: Choose, sampling: Sampling, expected: list[float]
) -> None:
    from halfmoon_engine.sampling.sampler import apply_penalties

    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    scores = logits[0].numpy().copy()
    draw = Draw(sampling, (0, 2, 2), 1)
    apply_penalties(scores, draw)
    assert scores.tolist() == pytest.approx(expected)
    best = expected.index(max(expected))
    kept = logits.clone()
    assert choose(logits, [draw], [3]) == [best]
    assert logits.equal(kept)


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
