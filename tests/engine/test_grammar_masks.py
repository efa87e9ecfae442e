"""An answer keeps to its grammar, whatever the model would rather say."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from halfmoon_engine.interface import (
    Draw,
    GrammarFailed,
    PendingToken,
    Run,
    SequenceState,
    TokenResult,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Driver, Tiny, open_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["wet", "dry"]}, "maxItems": 2},
        "é": {"type": ["boolean", "null"]},
    },
    "required": ["name", "size", "tags", "é"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
PROMPT = list(range(20, 60))
TextOf = Callable[[Sequence[int]], str]


@pytest.fixture(scope="module")
def driver(tiny: Tiny) -> Any:
    return Driver(open_tiny(tiny("llama")), 4096)


@pytest.fixture(scope="module")
def text_of(tiny: Tiny) -> TextOf:
    tokenizer = Tokenizer.from_file(str(tiny("llama") / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(list(tokens)))


def chosen(engine: Any, runs: Sequence[Run]) -> list[TokenResult | None]:
    """What a forward chooses, with what was late at first."""
    result: list[TokenResult | None] = engine.forward(runs)
    while late := {i: each for i, each in enumerate(result) if isinstance(each, PendingToken)}:
        for i, each in zip(late, engine.finish([*late.values()], 0.02), strict=True):
            result[i] = each
    return result


def answer(
    driver: Any, sampling: Sampling, *, most: int = 400, scratch: SequenceState | None = None
) -> list[int]:
    """Tokens until an end token, which is left out."""
    tokens, pages, start = list(PROMPT), driver.pages_for(len(PROMPT) + most), 0
    while len(tokens) < len(PROMPT) + most:
        draw = Draw(sampling, tuple(tokens), len(PROMPT), state=scratch)
        (token,) = chosen(driver.engine, [Run(tokens[start:], start, pages, draw)])
        start = len(tokens)
        assert isinstance(token, int)
        if token in EOS_TOKEN_IDS:
            break
        tokens.append(token)
    driver.free(pages)
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_random_weights_write_json_of_the_schema(
    tmp_path: Path, text_of: TextOf, seed: int, temperature: float
) -> None:
    folder = make_tiny_model("qwen3" if seed % 2 else "llama", tmp_path, seed=10 + seed)
    engine = open_tiny(folder)
    sampling = Sampling(temperature=temperature, seed=seed, grammar=GRAMMAR)
    said = text_of(answer(Driver(engine, 1024), sampling, scratch=SequenceState()))
    jsonschema.validate(json.loads(said), SCHEMA)


def test_an_answer_ends_when_it_is_complete_and_not_before(driver: Any, text_of: TextOf) -> None:
    sampling = Sampling(temperature=0.0, grammar='start: "The moon rises"')
    assert text_of(answer(driver, sampling, most=40)) == "The moon rises"


@pytest.mark.parametrize(
    ("grammar", "ends"), [('start: "moon" "!"*', False), ('start: "moon"', True)]
)
def test_an_end_that_comes_too_early_is_masked_unless_the_grammar_leaves_nothing_else(
    driver: Any, grammar: str, ends: bool
) -> None:
    words = answer(driver, Sampling(temperature=0.0, grammar='start: "moon"'), most=40)
    biases = tuple((token, 100.0) for token in EOS_TOKEN_IDS)
    sampling = Sampling(temperature=0.0, grammar=grammar, logit_bias=biases)
    tokens, pages = [*PROMPT, *words], driver.pages_for(len(PROMPT) + len(words))
    draw = Draw(sampling, tokens, len(PROMPT), masked=EOS_TOKEN_IDS)
    (token,) = chosen(driver.engine, [Run(tokens, 0, pages, draw)])
    assert (token in EOS_TOKEN_IDS) is ends
    driver.free(pages)


def test_a_matcher_made_anew_goes_on_as_the_kept_one(driver: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=5, grammar=GRAMMAR)
    kept = answer(driver, sampling, scratch=SequenceState())
    assert kept == answer(driver, sampling)
    assert len(kept) > 10


def drawn(driver: Any, draws: Sequence[Draw]) -> list[TokenResult | None]:
    """What each of these chooses behind a prompt of its own, all in one forward."""
    prompts = [PROMPT[i:] for i in range(len(draws))]
    pages = [driver.pages_for(len(prompt)) for prompt in prompts]
    runs = [Run(p, 0, at, d) for p, at, d in zip(prompts, pages, draws, strict=True)]
    outcomes = chosen(driver.engine, runs)
    for each in pages:
        driver.free(each)
    return outcomes


def test_the_same_draw_made_twice_gives_the_same_token(driver: Any) -> None:
    sampling = Sampling(temperature=0.0, grammar=GRAMMAR)
    draw = Draw(sampling, PROMPT, len(PROMPT), state=SequenceState())
    assert drawn(driver, [draw]) == drawn(driver, [draw])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_others_of_a_batch_draw_as_they_would_alone(driver: Any, temperature: float) -> None:
    free = Draw(Sampling(temperature=temperature, seed=3))
    bound = Draw(Sampling(temperature=0.0, grammar=GRAMMAR), PROMPT, len(PROMPT))
    broken = Draw(Sampling(grammar="start: ("), PROMPT, len(PROMPT))
    alone, mixed = drawn(driver, [free] * 4), drawn(driver, [free, bound, broken, free])
    assert (mixed[0], mixed[3]) == (alone[0], alone[3])
    assert mixed[1] is not None and mixed[1] != alone[1]
    assert isinstance(mixed[2], GrammarFailed) and mixed[2].invalid


def test_an_answer_outside_its_grammar_gets_no_token(driver: Any) -> None:
    outside = Draw(Sampling(grammar='start: "{}"'), PROMPT, len(PROMPT) - 1)
    (outcome,) = drawn(driver, [outside])
    assert isinstance(outcome, GrammarFailed) and not outcome.invalid


def test_a_bias_against_what_must_come_changes_nothing(driver: Any, text_of: TextOf) -> None:
    biases = tuple((token, -100.0) for token in range(3, 300))
    sampling = Sampling(temperature=0.0, grammar='start: "moon"', logit_bias=biases)
    assert text_of(answer(driver, sampling, most=20)) == "moon"
