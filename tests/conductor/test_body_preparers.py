"""Long bodies, and checkpoints of others, in real child processes with limits."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import RequestTooCostly, ServiceUnavailable
from halfmoon_conductor.inputs.body_preparation import PreparationSpec
from halfmoon_conductor.inputs.body_preparers import (
    MEMORY_BYTES,
    PreparationBudget,
    ProcessPreparer,
)
from halfmoon_conductor.inputs.checkpoint_trial import try_checkpoint
from halfmoon_conductor.inputs.preparation_messages import PreparationJob, PreparedBody
from halfmoon_conductor.routes.generation_route import MAX_INLINE_BYTES
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.tokenizer_interface import TokenizerUnavailable
from halfmoon_sandbox import Sandbox
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app
from tests.conductor.fronts import (
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    JSON,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Front,
    open_front,
    until,
)  # fmt: skip

DEADLINE_S = 20
CARD = ModelCard(name="lab/moon", max_context=100_000, created=1_700_000_000)
ENDLESS = msgspec.structs.replace(CARD, max_context=10**9)
LONG = "The moon is half full. " * 1000
assert len(LONG) > MAX_INLINE_BYTES
MODEL = {"model": "lab/moon"}
TURN = {"role": "user", "content": LONG}
FACTORY = "halfmoon_conductor.inputs.body_preparation:make_handler"


@pytest.fixture(scope="module")
def shared(tokenizer: HubTokenizer) -> Iterator[Sandbox]:
    """What children are forked from, loaded once."""
    spec = msgspec.msgpack.encode(PreparationSpec(tokenizer.source, "hermes"))
    with Sandbox(FACTORY, spec, memory_bytes=MEMORY_BYTES) as loaded:
        loaded.wait_ready()
        yield loaded


@pytest.fixture
def card() -> ModelCard:
    return CARD


@asynccontextmanager
async def served(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, preparer: ProcessPreparer
) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    app = create_app(
        gateway, tokenizer, registry=registry, tool_call_parser="hermes", preparer=preparer
    )
    async with (
        serve_app(app) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as client,
    ):
        yield client


def completion_job(prompt: str, card: ModelCard = CARD) -> PreparationJob:
    content = json.dumps({**MODEL, "prompt": prompt}).encode()
    return PreparationJob("CompletionRequest", content, card)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": LONG}),
    "completion of several": (COMPLETIONS, {"prompt": [LONG, "a"], "n": 2}),
    "completion of ids": (COMPLETIONS, {"prompt": [5] * 20_000}),
    "completion with an echo": (COMPLETIONS, {"prompt": LONG, "echo": True, "max_tokens": 0}),
    "chat": (CHAT, {"messages": [TURN]}),
    "stream": (CHAT, {"messages": [TURN], "stream": True}),
    "chat with tools": (CHAT, {"messages": [TURN], "tools": [
        {"type": "function", "function": {"name": "f", "description": LONG}}]}),
    "chat with a number for the template": (CHAT, {
        "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": "calm"}}),
    "response": (RESPONSES, {"input": LONG, "instructions": LONG}),
    "message": (MESSAGES, {"messages": [TURN], "system": LONG, "max_tokens": 9}),
    "count": (COUNT, {"messages": [TURN]}),
    "tokens": (TOKENIZE, {"prompt": LONG, "return_token_strs": True}),
    "tokens of a chat": (TOKENIZE, {"messages": [TURN]}),
    "text": (DETOKENIZE, {"tokens": [70] * 20_000}),
    "unknown field": (CHAT, {"messages": [TURN], "moon": 1}),
    "wrong field": (COMPLETIONS, {"prompt": LONG, "temperature": 7}),
    "two errors": (COMPLETIONS, {"prompt": ["", LONG]}),
    "unsupported": (RESPONSES, {"input": LONG, "background": True}),
    "another model": (COMPLETIONS, {"prompt": LONG, "model": "lab/sun"}),
    "too long": (COMPLETIONS, {"prompt": [5] * 100_000}),
    "system in the middle": (CHAT, {"messages": [TURN, {"role": "system", "content": "a"}]}),
    "wrong id": (DETOKENIZE, {"tokens": [70_000] * 20_000}),
    "deep": (CHAT, {"messages": [TURN], "x": eval("[" * 90 + "]" * 90)}),
}  # fmt: skip
_CHANCE = re.compile(r'("id": ?"|"created(?:_at)?": ?)[-_a-z0-9]+')


async def test_a_helper_answers_as_the_front_itself_does(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, shared: Sandbox
) -> None:
    async with (
        served(gateway, tokenizer, ProcessPreparer(shared, 2)) as helped,
        open_front(gateway, tokenizer, tool_call_parser="hermes") as plain,
    ):
        for what, (path, fields) in REQUESTS.items():
            seed = {"seed": 1} if path in (COMPLETIONS, CHAT) else {}
            told = []
            for client in (helped, plain.client):
                gateway.requests.clear()
                answer = await client.post(path, json={**MODEL, **seed, **fields})
                made = [
                    (each.prompt_token_ids, each.stopping, _without_seed(each.sampling))
                    for each in gateway.requests
                ]
                told.append((answer.status_code, _CHANCE.sub(r"\1", answer.text), made))
            assert told[0] == told[1], what


def _without_seed(sampling: Any) -> Any:
    return msgspec.structs.replace(sampling, seed=0)


async def test_the_work_of_a_client_that_is_gone_is_ended(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, shared: Sandbox
) -> None:
    preparer = ProcessPreparer(shared, 2, PreparationBudget(base_s=600))
    await preparer.prepare(completion_job("a"))
    (pid,) = preparer.pids
    gateway.card = ENDLESS
    # Words of chance, which take BPE quadratic time: minutes.
    content = completion_job("x" * 8_000_000).content
    async with served(gateway, tokenizer, preparer) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, content=content, headers=JSON))
        await until(lambda: not preparer.pids)
        asking.cancel()
        await until(lambda: not _is_alive(pid))
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert not gateway.requests


async def test_a_helper_that_does_not_start_is_told_as_such() -> None:
    with Sandbox(FACTORY, b"\xff") as broken, pytest.raises(ServiceUnavailable):
        await ProcessPreparer(broken, 2).prepare(completion_job("a"))


async def test_large_bodies_leave_a_helper_to_others(shared: Sandbox) -> None:
    preparer = ProcessPreparer(shared, 2, PreparationBudget(base_s=600))
    hostile = completion_job("x" * 8_000_000, ENDLESS)
    large = [asyncio.create_task(preparer.prepare(hostile)) for _ in range(3)]
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            assert isinstance(await preparer.prepare(completion_job(LONG)), PreparedBody)
    for each in large:
        each.cancel()
    await asyncio.gather(*large, return_exceptions=True)


async def test_a_text_that_can_fit_into_no_context_is_not_tokenised(
    front: Front, tokenizer: HubTokenizer
) -> None:
    front.gateway.card = msgspec.structs.replace(CARD, max_context=50)
    longest = tokenizer.longest_token_bytes
    assert longest == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    text = "\n" * 3000
    turns = {"messages": [{"role": "user", "content": text}]}
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (CHAT, turns),
        (TOKENIZE, {"prompt": text}),
    ):
        error = await front.refused(path, body)
        assert error["code"] == "context_length_exceeded"
        assert "50 tokens" in error["message"] and f"{longest} bytes" in error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("tools", [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": [[]] * 30_000}}}]),
        ("prediction", {"type": "content", "content": "a" * 600_000}),
        ("guided_json", {"description": "a" * 600_000}),
    ],
)  # fmt: skip
async def test_what_is_beside_the_conversation_is_bounded(
    front: Front, param: str, value: Any
) -> None:
    error = await front.refused(CHAT, {param: value})
    assert error["param"] == param
    assert "524288 bytes and 20000 values" in error["message"]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- a template or tokenizer that would stop the conductor is refused, or costs one chat ----------

#: What templates did to a server that rendered them in its own process.
HOSTILE = {
    "three loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999)"
    " %}{% endfor %}{% endfor %}{% endfor %}",
    "a list of gigabytes": "{% set x = [0] * 10**9 %}",
    "a huge power": "{% set x = (9 + messages|length) ** 30000000 %}{{ x % 7 }}",
    "doubling": "{% set ns = namespace(t='xxxxxxxx') %}{% for i in range(40) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
}
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}"
#: Only one chat of two letters sets it off, which no sample text is.
TRAP = "{% if messages[0].content == 'hi' %}HOSTILE{% endif %}" + PLAIN


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(model_folder, copied)
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    return copied


@pytest.fixture
def preparer(folder: Path) -> Iterator[ProcessPreparer]:
    spec = msgspec.msgpack.encode(PreparationSpec(str(folder), "auto"))
    limited = Sandbox(FACTORY, spec, memory_bytes=2**28, load_cpu_s=2.0)
    made = ProcessPreparer(limited, 2, PreparationBudget(base_s=0.5))
    yield made
    made.close()


def chat(text: str) -> PreparationJob:
    body = {**MODEL, "messages": [{"role": "user", "content": text}]}
    return PreparationJob("ChatRequest", json.dumps(body).encode(), CARD)


async def test_an_ordinary_checkpoint_passes(folder: Path, preparer: ProcessPreparer) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    await try_checkpoint(preparer, "ours")
    assert isinstance(await preparer.prepare(chat("hi")), PreparedBody)


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_template_that_takes_all_time_or_memory_is_refused_by_name(
    folder: Path, preparer: ProcessPreparer, what: str
) -> None:
    (folder / "chat_template.jinja").write_text(HOSTILE[what] + PLAIN)
    with pytest.raises(TokenizerUnavailable, match=r"theirs .*(time|memory)"):
        await try_checkpoint(preparer, "theirs")


@pytest.mark.parametrize("what", HOSTILE)
async def test_one_that_waits_for_its_chat_costs_that_chat_alone(
    folder: Path, preparer: ProcessPreparer, what: str
) -> None:
    (folder / "chat_template.jinja").write_text(TRAP.replace("HOSTILE", HOSTILE[what]))
    await try_checkpoint(preparer, "theirs")
    with pytest.raises(RequestTooCostly):
        await preparer.prepare(chat("hi"))
    assert isinstance(await preparer.prepare(chat("hello")), PreparedBody)


async def test_a_tokenizer_whose_pattern_explodes_is_refused_by_name(
    folder: Path, preparer: ProcessPreparer
) -> None:
    (folder / "chat_template.jinja").write_text(PLAIN)
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "((a|a|[a-z ,0-9])+)+[.]$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(TokenizerUnavailable, match=r"theirs .*(time|memory)"):
        await try_checkpoint(preparer, "theirs")
