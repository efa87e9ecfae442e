"""An answer keeps to its grammar, which costs its own request, and nothing of anybody else's."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
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
from halfmoon_engine.sampling import grammar_masks as grammar_module
from halfmoon_engine.sampling.grammar_masks import GrammarMasks
from halfmoon_models.tokenizer.tokenizer_builder import build_tokenizer
from halfmoon_protocol.sampling import MAX_GRAMMAR_CPU_S, Sampling
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.engine.driver import Driver, Tiny, open_tiny
from tests.sandbox.killed_children import kill_next_children

PROMPT = list(range(20, 60))
FREE = Draw(Sampling(temperature=0.0))


def _chained(n: int, depth: int) -> str:
    def link(i: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            schema = {"items": schema}
        return schema

    links = {f"d{i}": link(i) for i in range(n)}
    return json.dumps({"$defs": {**links, f"d{n}": {}}, "$ref": "#/$defs/d0"})


#: Each takes minutes, gigabytes, or the process.
HOSTILE = {
    "multiple": 'start: %json {"type":"integer","multipleOf":2147483648}',
    "stars": f"start: /{'a*' * 30_000}/",
    "chain": f"start: %json {_chained(110, 15)}",
}


@pytest.fixture
def driver(tiny: Tiny) -> Iterator[Any]:
    engine = open_tiny(tiny("llama"))
    assert engine._grammars is not None
    yield Driver(engine, 4096)
    engine._grammars.close()


def finish(engine: Any, late: PendingToken) -> TokenResult:
    """The outcome, however late."""
    outcome: TokenResult = late
    while isinstance(outcome, PendingToken):
        (outcome,) = engine.finish([outcome], 0.1)
    return outcome


def draw_of(grammar: str, history: Sequence[int] = PROMPT) -> Draw:
    sampling = Sampling(temperature=0.0, grammar=grammar)
    return Draw(sampling, tuple(history), len(PROMPT), state=SequenceState())


@pytest.mark.parametrize("name", HOSTILE)
def test_others_get_all_their_tokens_while_a_hostile_grammar_is_worked_on(
    driver: Any, name: str
) -> None:
    engine = driver.engine
    expected = driver.generate(PROMPT, 20)
    pages, other = driver.pages_for(len(PROMPT)), driver.pages_for(len(PROMPT) + 20)
    hostile, first = engine.forward(
        [Run(PROMPT, 0, pages, draw_of(HOSTILE[name])), Run(PROMPT, 0, other, FREE)]
    )
    said = [first]
    while len(said) < 20:
        (token,) = engine.forward([Run(said[-1:], len(PROMPT) + len(said) - 1, other, FREE)])
        said.append(token)
    assert said == expected
    outcome = finish(engine, hostile) if isinstance(hostile, PendingToken) else hostile
    # A machine that had too little time for it gives no verdict: it is tried again.
    while isinstance(outcome, GrammarFailed) and outcome.retryable:
        (hostile,) = engine.forward([Run(PROMPT, 0, pages, draw_of(HOSTILE[name]))])
        outcome = finish(engine, hostile) if isinstance(hostile, PendingToken) else hostile
    assert isinstance(outcome, GrammarFailed)
    assert outcome.invalid


def test_a_grammar_that_could_not_be_compiled_in_time_is_not_tried_again(driver: Any) -> None:
    pages = driver.pages_for(len(PROMPT))
    runs = [Run(PROMPT, 0, pages, draw_of(HOSTILE["multiple"]))]
    (late,) = driver.engine.forward(runs)
    first = finish(driver.engine, late)
    (again,) = driver.engine.forward(runs)
    assert again == first


def test_a_late_token_is_the_one_in_time(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = driver.pages_for(len(PROMPT))
    draw = draw_of('start: "moon" | "sun" | "star"')
    (outcome,) = driver.engine.forward([Run(PROMPT, 0, pages, draw)])
    in_time = finish(driver.engine, outcome) if isinstance(outcome, PendingToken) else outcome
    with monkeypatch.context() as standing_still:
        standing_still.setattr(grammar_module._Process, "advance", lambda *_: None)
        (late,) = driver.engine.forward([Run(PROMPT, 0, pages, draw)])
    assert isinstance(late, PendingToken)
    assert finish(driver.engine, late) == in_time


@pytest.fixture
def grammars(tiny: Tiny) -> Iterator[GrammarMasks]:
    made = GrammarMasks.for_model(build_tokenizer(tiny("llama")).definition, 400, EOS_TOKEN_IDS)
    assert made is not None
    yield made
    made.close()


def mask_of(grammars: GrammarMasks, draw: Draw) -> Any:
    mask = grammars.request_mask(draw)
    while mask.result is None:
        grammars.wait_for_masks([mask], 1.0)
    return mask.result


def child_of(grammars: GrammarMasks, text: str) -> int:
    child = grammars._processes[text].child
    assert child is not None
    return child.pid


def test_a_process_that_others_used_may_die_once_of_what_they_left(grammars: GrammarMasks) -> None:
    text = 'start: "a" | "b"'
    expected = mask_of(grammars, draw_of(text))
    process = grammars._processes[text]
    os.kill(child_of(grammars, text), signal.SIGKILL)
    assert (mask_of(grammars, draw_of(text)) == expected).all()
    assert process.child is not None


def test_a_grammar_whose_processes_are_all_killed_fails_for_now_and_is_tried_again_later(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_next_children(monkeypatch, 1)
    assert not isinstance(mask_of(grammars, draw_of('start: "b"')), GrammarFailed)
    kill_next_children(monkeypatch, 2)
    failed = mask_of(grammars, draw_of('start: "a"'))
    assert isinstance(failed, GrammarFailed)
    assert (failed.invalid, failed.retryable) == (False, True)
    assert "from outside" in failed.reason
    assert not isinstance(mask_of(grammars, draw_of('start: "a"')), GrammarFailed)


def test_an_answer_goes_on_when_the_template_is_killed(grammars: GrammarMasks) -> None:
    text = 'start: "a" | "b"'
    expected = mask_of(grammars, draw_of(text))
    pid = grammars._sandbox.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while grammars._sandbox.pid == pid:
        assert (mask_of(grammars, draw_of(text)) == expected).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("start: /((a{1000}){1000}){1000}/", "too many"),
        ('start: "a" X\nX: /b/ & /c/', "matches no text"),
    ],
    ids=["a limit of the library", "a dead end, told in our words"],
)
def test_what_ends_an_answer_in_its_middle_is_the_grammars_fault(
    grammars: GrammarMasks, text: str, words: str
) -> None:
    history = list(PROMPT)
    while not isinstance(mask := mask_of(grammars, draw_of(text, history)), GrammarFailed):
        history.append(int(mask.nonzero()[0][-1]))
    assert words in mask.reason and "NoExtension" not in mask.reason
    assert mask.invalid


def test_masks_count_against_the_same_budget_as_compiling(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, scratch = "start: /[a-z]*/", SequenceState()
    draw = Draw(Sampling(grammar=text), PROMPT, len(PROMPT), state=scratch)
    assert not isinstance(mask_of(grammars, draw), GrammarFailed)
    following: Any = scratch.value
    assert following.spent_s > 0
    limits: list[float] = []
    child: Any = grammars._processes[text].child
    begin = child.begin

    def noted(request: bytes, *, cpu_s: float) -> None:
        limits.append(cpu_s)
        begin(request, cpu_s=cpu_s)

    monkeypatch.setattr(child, "begin", noted)
    following.spent_s = 1.5
    mask_of(grammars, draw)
    assert limits == [pytest.approx(MAX_GRAMMAR_CPU_S - 1.5)]


def test_a_process_works_no_more_for_a_request_that_has_gone(grammars: GrammarMasks) -> None:
    mask_of(grammars, draw_of('start: "a"'))  # the template has loaded
    text = HOSTILE["stars"]
    mask: Any = grammars.request_mask(draw_of(text))
    pid = child_of(grammars, text)
    del mask
    # Whatever is asked next, of that grammar too, finds the process ended.
    grammars._processes[text].advance(grammars)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def test_more_grammars_than_processes_are_all_followed(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_PROCESSES", 2)
    texts = [f'start: "{letter}"' for letter in "abcdef"]
    masks = [grammars.request_mask(draw_of(text)) for text in texts]
    while any(mask.result is None for mask in masks):
        grammars.wait_for_masks(masks, 1.0)
    assert not any(isinstance(mask.result, GrammarFailed) for mask in masks)
    assert sum(process.child is not None for process in grammars._processes.values()) <= 2


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
TextOf = Callable[[Sequence[int]], str]


@pytest.fixture(scope="module")
def writer(tiny: Tiny) -> Any:
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
    writer: Any, sampling: Sampling, *, most: int = 400, scratch: SequenceState | None = None
) -> list[int]:
    """Tokens until an end token, which is left out."""
    tokens, pages, start = list(PROMPT), writer.pages_for(len(PROMPT) + most), 0
    while len(tokens) < len(PROMPT) + most:
        draw = Draw(sampling, tuple(tokens), len(PROMPT), state=scratch)
        (token,) = chosen(writer.engine, [Run(tokens[start:], start, pages, draw)])
        start = len(tokens)
        assert isinstance(token, int)
        if token in EOS_TOKEN_IDS:
            break
        tokens.append(token)
    writer.free(pages)
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


@pytest.mark.parametrize(
    ("grammar", "ends"), [('start: "moon" "!"*', False), ('start: "moon"', True)]
)
def test_an_end_that_comes_too_early_is_masked_unless_the_grammar_leaves_nothing_else(
    writer: Any, grammar: str, ends: bool
) -> None:
    words = answer(writer, Sampling(temperature=0.0, grammar='start: "moon"'), most=40)
    biases = tuple((token, 100.0) for token in EOS_TOKEN_IDS)
    sampling = Sampling(temperature=0.0, grammar=grammar, logit_bias=biases)
    tokens, pages = [*PROMPT, *words], writer.pages_for(len(PROMPT) + len(words))
    draw = Draw(sampling, tokens, len(PROMPT), masked=EOS_TOKEN_IDS)
    (token,) = chosen(writer.engine, [Run(tokens, 0, pages, draw)])
    assert (token in EOS_TOKEN_IDS) is ends
    writer.free(pages)


def test_a_matcher_made_anew_goes_on_as_the_kept_one(writer: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=5, grammar=GRAMMAR)
    kept = answer(writer, sampling, scratch=SequenceState())
    assert kept == answer(writer, sampling)
    assert len(kept) > 10


def drawn(writer: Any, draws: Sequence[Draw]) -> list[TokenResult | None]:
    """What each of these chooses behind a prompt of its own, all in one forward."""
    prompts = [PROMPT[i:] for i in range(len(draws))]
    pages = [writer.pages_for(len(prompt)) for prompt in prompts]
    runs = [Run(p, 0, at, d) for p, at, d in zip(prompts, pages, draws, strict=True)]
    outcomes = chosen(writer.engine, runs)
    for each in pages:
        writer.free(each)
    return outcomes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_others_of_a_batch_draw_as_they_would_alone(writer: Any, temperature: float) -> None:
    free = Draw(Sampling(temperature=temperature, seed=3))
    bound = Draw(Sampling(temperature=0.0, grammar=GRAMMAR), PROMPT, len(PROMPT))
    broken = Draw(Sampling(grammar="start: ("), PROMPT, len(PROMPT))
    alone, mixed = drawn(writer, [free] * 4), drawn(writer, [free, bound, broken, free])
    assert (mixed[0], mixed[3]) == (alone[0], alone[3])
    assert mixed[1] is not None and mixed[1] != alone[1]
    assert isinstance(mixed[2], GrammarFailed) and mixed[2].invalid


def test_an_answer_outside_its_grammar_gets_no_token(writer: Any) -> None:
    outside = Draw(Sampling(grammar='start: "{}"'), PROMPT, len(PROMPT) - 1)
    (outcome,) = drawn(writer, [outside])
    assert isinstance(outcome, GrammarFailed) and not outcome.invalid


def test_a_bias_against_what_must_come_changes_nothing(writer: Any, text_of: TextOf) -> None:
    biases = tuple((token, -100.0) for token in range(3, 300))
    sampling = Sampling(temperature=0.0, grammar='start: "moon"', logit_bias=biases)
    assert text_of(answer(writer, sampling, most=20)) == "moon"
