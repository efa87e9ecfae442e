"""Thousands of hostile grammars: each costs its own request, and no process, loop or batch.

`make fuzz` tries many; here are a few of them each time. What a grammar adds to the steps of
others is printed, not asserted: machines differ.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.api.structured_fields import StructuredOutputs, grammar_of_fields
from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.grammar.grammar_check_handler import CheckArgument
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.grammar.grammars import RequestedGrammar
from halfmoon_engine.interface import Draw, GrammarFailed, PendingToken, Run, SequenceState
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import MAX_GRAMMAR_CHARACTERS, Sampling
from halfmoon_testing.fuzz_inputs import n_fuzz_inputs
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from halfmoon_testing.models.hostile_grammars import HostileGrammar, random_grammar
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.nightly import by_day

N = n_fuzz_inputs(by_day(16, at_night=500))
BLOCK = 16
#: Hostile requests beside the victim.
N_HOSTILE = 3
#: Tokens of a hostile answer.
MOST = 12
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=3)


# -- at the conductor --------------------------------------------------------------------------


async def test_the_conductors_loop_stays_free_whatever_it_has_checked(
    folder: Path, dice: Random
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    checker = GrammarChecker(CheckArgument(tokenizer.to_str(), 400, EOS_TOKEN_IDS))
    await checker.check(RequestedGrammar('start: "a"', "grammar"))
    lags: list[float] = []
    ticking = asyncio.create_task(_tick(lags))
    outcomes: Counter[str] = Counter()
    candidates = [random_grammar(dice) for _ in range(N)]
    for start in range(0, N, 4):
        part = candidates[start : start + 4]
        for outcome in await asyncio.gather(*(_check(checker, each) for each in part)):
            outcomes[outcome] += 1
    ticking.cancel()
    print(f"{N} checks: {dict(outcomes)}; the loop's longest pause {max(lags) * 1e3:.1f} ms")
    assert await checker.check(RequestedGrammar('start: "still here"', "grammar"))
    checker.close()


async def _tick(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - before - 0.001)


async def _check(checker: GrammarChecker, each: HostileGrammar) -> str:
    field = {"schema": "json", "regex": "regex", "grammar": "grammar"}[each.kind]
    try:
        asked = StructuredOutputs.model_validate({field: each.text})
        wanted = await asyncio.to_thread(grammar_of_fields, None, asked, StructuredOutputs())
        assert wanted is not None
        await checker.check(wanted)
    except ApiError as error:
        return "over its limits" if "to check it" in error.message else "refused"
    return "fine"


# -- at a worker -------------------------------------------------------------------------------


class Victim:
    """A request without a grammar, whose answer is known."""

    def __init__(self, engine: Any, pages: Sequence[int]) -> None:
        self._engine, self._pages = engine, pages
        self._draw = Draw(Sampling(temperature=0.0))
        self.tokens = list(PROMPT)

    def run(self) -> Run:
        start = len(self.tokens) - 1 if len(self.tokens) > len(PROMPT) else 0
        return Run(self.tokens[start:], start, self._pages, self._draw)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) == len(self._pages) * BLOCK:
            del self.tokens[len(PROMPT) :]


class Hostile:
    """A request with a generated grammar."""

    def __init__(self, each: HostileGrammar, pages: Sequence[int], seed: int) -> None:
        self.sampling = Sampling(temperature=1.0, seed=seed, grammar=each.to_lark)
        self.pages, self.scratch = pages, SequenceState()
        self.tokens: list[int] = list(PROMPT)
        self.n_computed = 0
        self.late: PendingToken | None = None

    def run(self) -> Run:
        draw = Draw(self.sampling, tuple(self.tokens), len(PROMPT), state=self.scratch)
        return Run(self.tokens[self.n_computed :], self.n_computed, self.pages, draw)


@pytest.fixture
def engine(folder: Path) -> Iterator[Any]:
    opened: Any = open_engine(str(folder), block_size=BLOCK, dtype="float32", device="cpu")
    opened.attach(memoryview(bytearray(64 * opened.layout.block_bytes)))
    yield opened
    opened._grammars.close()


def test_a_victims_steps_go_on_beside_hostile_grammars(engine: Any, dice: Random) -> None:
    victim = Victim(engine, range(16))
    alone = [_step(engine, victim, [])[0] for _ in range(200)]
    expected: list[int] = victim.tokens[: len(PROMPT) + 100]
    hostile: list[Hostile] = []
    outcomes: Counter[str] = Counter()
    steps: list[float] = []
    n_begun = 0
    while n_begun < N or hostile:
        while len(hostile) < N_HOSTILE and n_begun < N:
            each = random_grammar(dice)
            if len(each.to_lark) > MAX_GRAMMAR_CHARACTERS:
                continue
            used = {request.pages[0] for request in hostile}
            first = next(p for p in range(16, 64, 8) if p not in used)
            hostile.append(Hostile(each, range(first, first + 8), n_begun))
            n_begun += 1
        took_s, over = _step(engine, victim, hostile)
        steps.append(took_s)
        for request, outcome in over:
            outcomes[outcome] += 1
            hostile.remove(request)
        n = min(len(victim.tokens), len(expected))
        assert victim.tokens[:n] == expected[:n]
    usual_s = statistics.median(alone)
    print(
        f"{N} grammars: {dict(outcomes)}; {len(steps)} steps of the victim: median "
        f"{statistics.median(steps) * 1e3:.1f} ms, longest {max(steps) * 1e3:.1f} ms, "
        f"{sum(step > usual_s + 0.05 for step in steps)} over {usual_s * 1e3:.1f} + 50 ms; alone "
        f"median {usual_s * 1e3:.1f}, longest {max(alone) * 1e3:.1f} ms"
    )


def _step(
    engine: Any, victim: Victim, hostile: Sequence[Hostile]
) -> tuple[float, list[tuple[Hostile, str]]]:
    """One step of the victim and of those that are not late; who is over, and how."""
    running = [request for request in hostile if request.late is None]
    late = [request for request in hostile if request.late is not None]
    began = time.perf_counter()
    token, *chosen = engine.forward([victim.run(), *(request.run() for request in running)])
    finished = engine.finish([request.late for request in late], 0.0) if late else []
    took_s = time.perf_counter() - began
    victim.add(token)
    over: list[tuple[Hostile, str]] = []
    for request, each in zip([*running, *late], [*chosen, *finished], strict=True):
        request.n_computed = len(request.tokens)
        request.late = each if isinstance(each, PendingToken) else None
        if isinstance(each, GrammarFailed):
            over.append((request, "invalid" if each.invalid else "not followed"))
        elif isinstance(each, int):
            request.tokens.append(each)
            if each in EOS_TOKEN_IDS or len(request.tokens) == len(PROMPT) + MOST:
                over.append((request, "answered"))
    return took_s, over
