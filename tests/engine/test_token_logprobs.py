"""Log probabilities: those of transformers' own forward, in any batch, changing no draw."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfmoon_engine.interface import Draw, Engine, PromptScoring, Run
from halfmoon_engine.load import open_engine
from halfmoon_engine.native.extension import native_extension
from halfmoon_engine.sampling.sampler import choose_tokens
from halfmoon_engine.sampling.token_logprobs import compute_logprobs, report_prompt_logprobs
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.sampling import Sampling
from tests.engine.driver import Driver, EngineOf, Tiny, prompt_of

SCORED = Sampling(temperature=0.0, logprobs=2)


def run_scored(
    engine: Engine, pages: Sequence[int], prompt: list[int], chunk: int
) -> tuple[list[TokenScore], TokenScore, int]:
    """A prompt in chunks: scores of its own tokens, and the first new token with its score."""
    told: list[TokenScore] = []
    first: list[TokenScore] = []
    others = Run([3], 0, [pages[-1]], Draw(Sampling(temperature=0.0)))
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        targets = prompt[start + 1 : start + 1 + len(part)]
        scoring = PromptScoring(targets, 2, told.extend) if targets else None
        last = start + len(part) == len(prompt)
        draw = Draw(SCORED, on_logprobs=first.extend) if last else None
        _, token = engine.forward([others, Run(part, start, pages[:-1], draw, scoring=scoring)])
    assert isinstance(token, int)
    (its_score,) = first
    return told, its_score, token


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_scores_are_transformers(arch: str, chunk: int, tiny: Tiny, engine_of: EngineOf) -> None:
    driver, prompt = Driver(engine_of(arch, 16), 200), prompt_of(40)
    told, first, token = run_scored(driver.engine, driver.pages_for(60), prompt, chunk)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny(arch), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(told) == len(prompt) - 1
    for row, target, each in zip(expected, [*prompt[1:], token], [*told, first], strict=True):
        assert each.logprob == pytest.approx(float(row[target]), abs=1e-3)
        assert each.rank == 1 + int((row > row[target]).sum())
        assert [other for other, _ in each.top] == row.topk(2).indices.tolist()
    assert first.top[0] == (token, first.logprob)


def test_a_fake_engine_scores_as_well_and_draws_the_same() -> None:
    engine = open_engine("fake://tiny?vocab=100", block_size=16)
    driver = Driver(engine, 200)
    told, first, token = run_scored(engine, driver.pages_for(60), list(range(40)), 16)
    assert len(told) == 39
    assert first.top[0] == (token, first.logprob)
    assert driver.generate(list(range(40)), 1) == [token]


def test_more_tokens_to_score_than_there_are_is_refused() -> None:
    driver = Driver(open_engine("fake://tiny", block_size=16), 64)
    scoring = PromptScoring([2, 3], 0, lambda _: None)
    with pytest.raises(ValueError, match="1 tokens and 2 to score"):
        driver.engine.forward([Run([1], 0, driver.pages_for(1), None, scoring=scoring)])


def test_scores_in_slices_are_those_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(4))
    tokens = list(range(9))
    whole = compute_logprobs(logits, tokens, 3)
    monkeypatch.setattr("halfmoon_engine.sampling.token_logprobs._LOGITS_AT_ONCE", 100)
    told: list[TokenScore] = []
    scoring = PromptScoring(tokens, 3, told.extend)
    report_prompt_logprobs(logits, [Run(tokens, 0, [0], None, scoring=scoring)], [None])
    assert [each.rank for each in told] == [each.rank for each in whole]
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in whole])


def test_biases_come_before_penalties_and_leave_the_scores_alone() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert choose_tokens(logits, [Draw(Sampling(temperature=0.0))], [0]) == [0]
    biased = Sampling(temperature=0.0, logit_bias=((2, 3.0), (0, -1.0)))
    assert choose_tokens(logits, [Draw(biased)], [0]) == [2]
    # 3.0 after the bias, halved by the penalty: less than the other's 1.9.
    penalised = Sampling(temperature=0.0, logit_bias=((2, 3.0), (0, -0.1)), repetition_penalty=2.0)
    assert choose_tokens(logits, [Draw(penalised, (2,), 1)], [1]) == [0]
    assert logits.tolist() == [[2.0, 1.0, 0.0]]


def test_rows_of_a_batch_are_scored_each_as_it_wants(native: Any) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6))
    told: dict[int, list[TokenScore]] = {}
    wishes = {0: 2, 1: None, 2: 5, 3: 0}
    runs = [
        Run([1], 0, [0], Draw(Sampling(logprobs=n_top), on_logprobs=_keep(told, row)))
        for row, n_top in wishes.items()
    ]
    # The last one's token is not chosen yet.
    report_prompt_logprobs(logits, runs, [7, 8, 9, None], native_extension(native))
    assert set(told) == {0, 2}
    for row, token in ((0, 7), (2, 9)):
        (expected,) = compute_logprobs(logits[row : row + 1], [token], wishes[row] or 0)
        (score,) = told[row]
        assert score.rank == expected.rank
        assert score.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [each for each, _ in score.top] == [each for each, _ in expected.top]


def _keep(told: dict[int, list[TokenScore]], row: int) -> Callable[[Sequence[TokenScore]], None]:
    return lambda scores: told.setdefault(row, []).extend(scores)
