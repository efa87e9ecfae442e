"""Sampling kernels choose numpy's tokens to the last one, on every instruction set."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "halfmoon_engine_native._native", reason="the kernels are not built: make native"
)

from halfmoon_engine.interface import Draw
from halfmoon_engine.sampling.exact_weights import exact_weights, exponent_scale
from halfmoon_engine.sampling.sampler import choose_tokens
from halfmoon_engine.sampling.token_logprobs import compute_logprobs
from halfmoon_engine.sampling.weighted_draw import draw_token, min_p_gap
from halfmoon_engine_native import _native
from halfmoon_protocol.sampling import Sampling
from tests.engine.native.paged_batch import guarded_floats

Floats = npt.NDArray[np.float32]
REFUSED = (ValueError, OverflowError, TypeError, BufferError)

#: Around the vectors, chunks and blocks of all instruction sets.
SIZES = (1, 2, 3, 15, 16, 17, 50, 127, 128, 129, 511, 513, 2047, 2049, 5000, 32_000)
PROBABILITIES = (1e-300, 1e-9, 0.001, 0.1, 0.5, 0.95, 0.9999, 1.0)
LAST_DIE = float(np.nextafter(1.0, 0.0))

scores_of_rows = st.builds(
    lambda **given: make_scores(**given),
    seed=st.integers(0, 2**32 - 1),
    n_vocab=st.sampled_from(SIZES),
    spread=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 4.0, 30.0, 1e30]),
    digits=st.sampled_from([0, 1, 6]),
    masked=st.sampled_from([0.0, 0.3, 0.99]),
)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-45, 1e-6, 0.3, 0.7, 1.0, 1.7, 100.0, 1e6]),
    top_p=st.sampled_from(PROBABILITIES),
    top_k=st.sampled_from([0, 0, 2, 5, 100, 2999, 10**6]),
    min_p=st.sampled_from([0.0, *PROBABILITIES]),
    seed=st.integers(0, 2**63 - 1),
)
either = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def make_scores(seed: int, n_vocab: int, spread: float, digits: int, masked: float) -> Floats:
    """Scores with ties and with tokens that must not come, before memory without access."""
    dice = np.random.default_rng(seed)
    scores = (spread * dice.standard_normal(n_vocab)).round(digits).astype(np.float32)
    scores[dice.random(n_vocab) < masked] = -np.inf
    return guarded_floats(scores)


def drawn(scores: Floats, sampling: Sampling, die: float) -> int:
    scale, gap = exponent_scale(sampling.temperature), min_p_gap(sampling)
    row = (scale, gap, sampling.top_k, sampling.top_p, die, None, None, None)
    (token,) = _native.choose_tokens(scores, len(scores), [row])
    return token


@either
@given(
    scores=scores_of_rows,
    sampling=samplings,
    die=st.one_of(st.sampled_from([0.0, LAST_DIE]), st.floats(0, LAST_DIE)),
)
def test_a_draw_is_numpys(
    instruction_set: str, scores: Floats, sampling: Sampling, die: float
) -> None:
    assert drawn(scores, sampling, die) == draw_token(scores, sampling, die)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_draws_beside_edges_are_numpys(
    instruction_set: str, temperature: float, spread: float
) -> None:
    """One weight with another last bit would move all edges after it."""
    scores = make_scores(7, 300, spread, 6, 0.0)
    weights = exact_weights(scores, scores.max(), temperature).astype(np.float64)
    edges = (weights.cumsum() / weights.sum())[:-1]
    sampling = Sampling(temperature=temperature)
    for die in (*(edges * (1 - 2.0**-45)), *(edges * (1 + 2.0**-45))):
        if die < 1:
            assert drawn(scores, sampling, die) == draw_token(scores, sampling, die)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("n_vocab", [1, 16, 700])
def test_a_row_without_a_highest_finite_score_is_drawn_as_numpy_draws_it(
    instruction_set: str, wrong: float, everywhere: bool, n_vocab: int
) -> None:
    scores = make_scores(1, n_vocab, 1.0, 6, 0.0)
    scores[:: 1 if everywhere else 300] = wrong
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(min_p=0.1)):
        for die in (0.0, 0.3, LAST_DIE):
            assert drawn(scores, sampling, die) == draw_token(scores, sampling, die)
    greedy = (0.0, -math.inf, 0, 1.0, 0.0, None, None, None)
    assert _native.choose_tokens(scores, n_vocab, [greedy]) == [int(scores.argmax())]


histories = st.tuples(st.lists(st.integers(0, 49), max_size=30), st.integers(0, 40))
biases = st.lists(st.tuples(st.integers(0, 49), st.floats(-100, 100)), max_size=5)


@st.composite
def whole_rows(draw: Any) -> tuple[Draw, int, list[bool] | None]:
    """A draw with all parameters, its position, and perhaps a grammar's mask."""
    history, n_prompt = draw(histories)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        top_p=draw(st.sampled_from([0.3, 0.9, 1.0])),
        top_k=draw(st.sampled_from([0, 1, 7])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.1, 1e6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.31, -2.0])),
        logit_bias=tuple(draw(biases)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
    mask = draw(st.none() | st.lists(st.booleans(), min_size=50, max_size=50))
    return Draw(sampling, history, n_prompt), draw(st.integers(0, 10**6)), mask


@either
@given(rows=st.lists(whole_rows(), min_size=1, max_size=5), digits=st.sampled_from([0, 6]))
def test_biases_penalties_and_masks_are_numpys_and_leave_the_logits_alone(
    instruction_set: str, rows: list[tuple[Draw, int, list[bool] | None]], digits: int
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = (3 * torch.randn(len(rows), 50, generator=generator)).round(decimals=digits)
    before = logits.clone()
    draws, positions = [draw for draw, _, _ in rows], [position for _, position, _ in rows]
    masks = {i: np.array(mask) for i, (_, _, mask) in enumerate(rows) if mask is not None}
    tokens = choose_tokens(logits, draws, positions, masks, _native)
    assert logits.equal(before)
    assert tokens == choose_tokens(logits, draws, positions, masks)


def test_rows_on_several_threads_are_those_of_one(n_threads: int) -> None:
    dice = np.random.default_rng(4)
    logits = torch.from_numpy(4 * dice.standard_normal((40, 3000), dtype=np.float32))
    draws = [
        Draw(Sampling(seed=i, top_p=0.5 + i / 80, presence_penalty=1.0), list(range(i)), 2)
        for i in range(40)
    ]
    tokens = choose_tokens(logits, draws, range(40), {}, _native)
    assert tokens == choose_tokens(logits, draws, range(40))
    scores = compute_logprobs(logits, tokens, 3, _native)
    assert [score.rank for score in scores] == [
        score.rank for score in compute_logprobs(logits, tokens, 3)
    ]


@either
@given(scores=scores_of_rows, share=st.floats(0, LAST_DIE), n_top=st.sampled_from([0, 1, 5, 20]))
def test_logprobs_are_numpys(
    instruction_set: str, scores: Floats, share: float, n_top: int
) -> None:
    token = int(share * len(scores))
    logits = torch.from_numpy(np.array(scores))[None]
    (known,) = _native.score_tokens(scores, len(scores), [token], n_top)
    if not math.isfinite(scores.max()):
        assert known is None
        return
    assert known is not None
    (expected,) = compute_logprobs(logits, [token], n_top)
    (score,) = compute_logprobs(logits, [token], n_top, _native)
    assert (score.logprob, score.rank, score.top) == known
    assert score.rank == expected.rank
    assert [each for each, _ in score.top] == [each for each, _ in expected.top]
    found = [score.logprob, *(logprob for _, logprob in score.top)]
    wanted = [expected.logprob, *(logprob for _, logprob in expected.top)]
    assert found == pytest.approx(wanted, rel=1e-6, abs=2e-6)


def test_scores_of_rows_that_are_no_numbers_are_numpys() -> None:
    logits = torch.tensor([[math.nan, 1.0], [0.5, 0.25]])
    wrong, right = compute_logprobs(logits, [1, 1], 2, _native)
    assert math.isnan(wrong.logprob)
    assert wrong.rank == 1
    assert [token for token, _ in right.top] == [0, 1]


ROW = (1.44, -math.inf, 0, 1.0, 0.5, None, None, None)


@pytest.mark.parametrize(
    "row",
    [
        (), ROW[:-1], list(ROW),
        *((scale, *ROW[1:]) for scale in (-1.0, math.nan, math.inf)),
        *((1.0, gap, *ROW[2:]) for gap in (0.5, math.nan)),
        *((*ROW[:2], top_k, *ROW[3:]) for top_k in (-1, 2**70)),
        *((*ROW[:3], top_p, *ROW[4:]) for top_p in (0.0, math.nan)),
        *((*ROW[:4], die, *ROW[5:]) for die in (1.0, -0.5, math.nan)),
        *(
            (*ROW[:5], biases, None, None)
            for biases in (3, ((1,),), ([1, 2.0],), ((50, 1.0),), ((-1, 1.0),))
        ),
        *(
            (*ROW[:6], (history, 0, 1.1, 0.0, 0.0), None)
            for history in ([50], [-1], ["a"], [2**80], 7)
        ),
        (*ROW[:6], ([1], -1, 1.1, 0.0, 0.0), None),
        (*ROW[:6], [[1], 0, 1.1, 0.0, 0.0], None),
        *((*ROW[:7], mask) for mask in (np.ones(49, np.bool_), "all")),
    ],
)  # fmt: skip
def test_a_row_of_wrong_parameters_is_refused_and_changes_nothing(row: Any) -> None:
    scores = make_scores(1, 100, 1.0, 6, 0.0)
    before = scores.copy()
    with pytest.raises(REFUSED):
        _native.choose_tokens(scores, 50, [ROW, row])
    assert (scores == before).all()


def test_scores_of_another_size_are_refused() -> None:
    scores = make_scores(1, 100, 1.0, 6, 0.0)
    for n_vocab in (-1, 0, 49, 101, 2**31, 2**62, 2**70):
        with pytest.raises(REFUSED):
            _native.choose_tokens(scores, n_vocab, [ROW, ROW])
        with pytest.raises(REFUSED):
            _native.score_tokens(scores, n_vocab, [0, 0], 1)
    for tokens, n_top in (([0, 50], 1), ([0, -1], 1), ([0, 0], -1), ([0, 0], 2**70), (7, 1)):
        with pytest.raises(REFUSED):
            _native.score_tokens(scores, 50, tokens, n_top)  # type: ignore[arg-type]
    first, second = _native.score_tokens(scores, 50, [0, 0], 2**62)
    assert first is not None and second is not None
    assert sorted(token for token, _ in first[2]) == list(range(50))
    read_only = np.array(scores)
    read_only.flags.writeable = False
    with pytest.raises(REFUSED):
        _native.choose_tokens(read_only, 50, [ROW, ROW])
