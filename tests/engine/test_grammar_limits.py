"""What a grammar may cost: its own request, and nothing of anybody else's."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

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
from halfmoon_sandbox import Child
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from tests.engine.driver import Driver, Tiny, open_tiny

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


def test_an_answer_goes_on_when_its_process_is_killed(grammars: GrammarMasks) -> None:
    text = 'start: "a" "b" "c"'
    scratch, history = SequenceState(), list(PROMPT)
    for letter in "abc":
        draw = Draw(Sampling(grammar=text), tuple(history), len(PROMPT), state=scratch)
        mask = mask_of(grammars, draw)
        (token,) = mask.nonzero()[0]
        history.append(int(token))
        if letter == "b":
            grammars._processes[text].close()
    assert len(set(history[len(PROMPT) :])) == 3


def test_a_process_that_others_used_may_die_once_of_what_they_left(grammars: GrammarMasks) -> None:
    text = 'start: "a" | "b"'
    expected = mask_of(grammars, draw_of(text))
    process = grammars._processes[text]
    os.kill(child_of(grammars, text), signal.SIGKILL)
    assert (mask_of(grammars, draw_of(text)) == expected).all()
    assert process.child is not None


def kill_fresh_processes(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Kill the next `n` processes that get a grammar, as the kernel does when it lacks memory."""
    begin, left = Child.begin, [*range(n)]

    def begin_and_die(child: Child, request: bytes, *, cpu_s: float) -> None:
        if left:
            left.pop()
            os.kill(child.pid, signal.SIGKILL)
        begin(child, request, cpu_s=cpu_s)

    monkeypatch.setattr(Child, "begin", begin_and_die)


def test_a_grammar_is_not_blamed_for_a_process_that_is_killed(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_fresh_processes(monkeypatch, 1)
    assert not isinstance(mask_of(grammars, draw_of('start: "a"')), GrammarFailed)


def test_a_grammar_whose_processes_are_all_killed_fails_for_now_and_is_tried_again_later(
    grammars: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_fresh_processes(monkeypatch, 2)
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
