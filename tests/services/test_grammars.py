"""Answers of a given form, through prefill, transfer and decode, and through a worker's death."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.errors import ApiError, InvalidRequest, UnusableGrammar
from halfmoon_conductor.grammar import grammars
from halfmoon_conductor.tools.tool_call_grammars import calls_only_grammar, free_text_grammar
from halfmoon_conductor.tools.tool_call_parser import ToolCallParser
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_scheduling.prefill.prefill_request import PrefillPhase
from halfmoon_testing.models.byte_tokenizer import EOS_TOKEN_IDS
from halfmoon_testing.models.tiny_models import make_tiny_model
from halfmoon_workers.prefill.prefill_worker import PrefillWorker

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 3,
            "maxItems": 5,
        },
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["colour", "numbers", "note"],
    "additionalProperties": False,
}
STOPPING = Stopping(max_new_tokens=600, stop_token_ids=EOS_TOKEN_IDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture
def make_engine(folder: Path) -> Callable[[], Engine]:
    return lambda: open_engine(str(folder), block_size=16, dtype="float32", device="cpu", threads=2)


@pytest.fixture
def text_of(folder: Path) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(tokens))


def asking(seed: int, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, seed=seed, grammar=grammars.grammar_of_schema(SCHEMA))


async def test_json_of_a_schema_beside_requests_that_say_what_they_like(
    local_cluster: Callable[..., Any],
    make_engine: Callable[[], Engine],
    text_of: Callable[[list[int]], str],
) -> None:
    prompts = [[30 + i] * (5 + 9 * i) for i in range(4)]
    async with local_cluster(make_engine, n_prefill=2, n_decode=2) as cluster:
        alone = [await cluster.generate(prompt, 30) for prompt in prompts]
        bound = [
            cluster.generate(prompt, 0, sampling=asking(i, i % 2), stopping=STOPPING)
            for i, prompt in enumerate(prompts)
        ]
        free = [cluster.generate(prompt, 30) for prompt in prompts]
        *answers, free_0, free_1, free_2, free_3 = await asyncio.gather(*bound, *free)
        assert [free_0, free_1, free_2, free_3] == alone
        for answer in answers:
            assert answer[-1] in EOS_TOKEN_IDS
            jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
        await cluster.settled()


async def test_random_weights_call_a_tool_that_they_must_or_may_call_with_valid_arguments(
    local_cluster: Callable[..., Any],
    make_engine: Callable[[], Engine],
    text_of: Callable[[list[int]], str],
) -> None:
    parsers: list[ToolCallFormat] = ["hermes", "llama3_json"]
    async with local_cluster(make_engine) as cluster:

        async def said(prompt: list[int], sampling: Sampling, stopping: Stopping) -> str:
            return text_of(await cluster.generate(prompt, 0, sampling=sampling, stopping=stopping))

        for parser in parsers:
            must = calls_only_grammar(parser, [("paint", SCHEMA)], 1)
            sampling = Sampling(temperature=0.0, grammar=must)
            reader = ToolCallParser(parser, 1)
            _, calls = reader.feed(await said([40] * 20, sampling, STOPPING))
            words, more = reader.finish()
            (call,) = [*calls, *more]
            assert (words, call.name) == ("", "paint")
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
            # Beside a strict tool: words or calls.
            may = free_text_grammar(parser, [("paint", SCHEMA)], 2)
            stopping = Stopping(max_new_tokens=60, stop_token_ids=EOS_TOKEN_IDS)
            for seed in range(4):
                sampling = Sampling(temperature=1.0, seed=seed, grammar=may)
                text = await said([40 + seed] * 20, sampling, stopping)
                reader = ToolCallParser(parser, 2, ("paint",), "exact")
                read = [reader.feed(text), reader.finish(cut=True)]
                assert "<tool_call>" not in "".join(words for words, _ in read)
                for call in (call for _, calls in read for call in calls):
                    if call.whole:
                        jsonschema.validate(json.loads(call.arguments), SCHEMA)
                # Words under a grammar are Unicode, broken off at the limit at the most.
                assert "\N{REPLACEMENT CHARACTER}" not in text[:-3]


async def test_a_retry_goes_on_within_the_grammar_where_the_dead_worker_stopped(
    local_cluster: Callable[..., Any],
    make_engine: Callable[[], Engine],
    text_of: Callable[[list[int]], str],
) -> None:
    prompt = list(range(20, 90))
    async with local_cluster(make_engine, n_decode=2) as cluster:
        expected = await cluster.generate(prompt, 0, sampling=asking(8), stopping=STOPPING)
        jsonschema.validate(json.loads(text_of(expected)), SCHEMA)
        said: list[int] = []
        async for event in cluster.events(prompt, 0, asking(8), stopping=STOPPING):
            said.append(event.token)
            if len(said) == 6:
                (name,) = (
                    name
                    for name, member in cluster.members.items()
                    if name.startswith("decode") and member.worker.batch.n_running
                )
                await cluster.kill(name)
        assert said == expected


@pytest.mark.parametrize("lost_at", ["prefill-0", "decode-0"])
async def test_a_grammar_that_a_worker_can_not_follow_fails_its_request_alone(
    local_cluster: Callable[..., Any], make_engine: Callable[[], Engine], lost_at: str
) -> None:
    async with local_cluster(make_engine) as cluster:
        cluster.members[lost_at].engine._grammars = None  # as of a model without a usable tokenizer
        failing = cluster.generate([5, 6, 7], 0, sampling=asking(1), stopping=STOPPING)
        others = cluster.generate([8, 9], 20)
        outcomes: Any = await asyncio.gather(failing, others, return_exceptions=True)
        assert isinstance(outcomes[0], ApiError)
        assert "grammar" in str(outcomes[0])
        assert len(outcomes[1]) == 20
        await cluster.settled()


async def test_tokens_that_are_late_hold_up_no_other_request_and_change_none(
    local_cluster: Callable[..., Any],
) -> None:
    in_time, late = FakeEngine(FakeModelSpec()), FakeEngine(FakeModelSpec(late=5))
    prompt, bound = [7] * 40, Sampling(temperature=0.0, grammar="any")
    expected = in_time.expected(prompt, 30)
    async with local_cluster(lambda: FakeEngine(late.model)) as cluster:
        answers = await asyncio.gather(
            *(cluster.generate([7] * 40, 30, sampling=bound) for _ in range(3)),
            *(cluster.generate([9, i], 200) for i in range(3)),
        )
        assert answers[:3] == [expected] * 3
        assert answers[3:] == [in_time.expected([9, i], 200) for i in range(3)]
        await cluster.settled()


def has_delayed(worker: PrefillWorker) -> bool:
    phases = [request.phase for request in worker.machine.requests.values()]
    return PrefillPhase.CHOOSING in phases


async def test_a_request_whose_token_is_late_can_be_given_up(
    local_cluster: Callable[..., Any],
) -> None:
    for n_tokens in (0, 3):  # while prefill has it, and while decode does
        model = FakeModelSpec(late=1_000_000 if n_tokens == 0 else 5)
        async with local_cluster(lambda model=model: FakeEngine(model)) as cluster:
            sampling = Sampling(temperature=0.0, grammar="any")
            events = cluster.events([7] * 40, 30, sampling)
            for _ in range(n_tokens):
                await anext(events)
            if n_tokens == 0:
                waiting = asyncio.create_task(anext(events))
                worker = cluster.members["prefill-0"].worker
                await cluster.until(lambda worker=worker: has_delayed(worker))
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await events.aclose()
            await cluster.settled()


SPINNING = '%json {"type":"integer","multipleOf":2147483648}'


async def test_a_grammar_that_ends_nowhere_or_takes_too_long_is_the_requests_fault(
    local_cluster: Callable[..., Any], make_engine: Callable[[], Engine]
) -> None:
    """And is not placed again, whether prefill or decode comes to know of it."""
    async with local_cluster(make_engine, n_prefill=2, n_decode=2) as cluster:
        alone = await cluster.generate([8, 9], 60)
        attempts: list[int] = []
        place = cluster.gateway._start_try

        def counted(stream: Any) -> None:
            attempts.append(stream.attempt)
            place(stream)

        cluster.gateway._start_try = counted
        for grammar, kind, told in (
            ('start: "" X\nX: /b/ & /c/', UnusableGrammar, "matches no text"),
            ('start: "a" X\nX: /b/ & /c/', UnusableGrammar, "matches no text"),
            (f"start: {SPINNING}", InvalidRequest, "processor time"),
            (f"start: /[a-z]{{3}}/ tail\ntail: {SPINNING}", InvalidRequest, "processor time"),
        ):
            attempts.clear()
            sampling = Sampling(temperature=0.0, grammar=grammar)
            failing = cluster.generate([5, 6, 7], 0, sampling=sampling, stopping=STOPPING)
            others = cluster.generate([8, 9], 60)
            outcomes: Any = await asyncio.gather(failing, others, return_exceptions=True)
            assert isinstance(outcomes[0], kind) and told in str(outcomes[0])
            assert outcomes[1] == alone
            assert len(attempts) == 2  # one each
            await cluster.settled()
