"""Long bodies, prepared by real child processes behind a real socket."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, ModelCard
from halfmoon_conductor.errors import RequestTooCostly, ServiceUnavailable
from halfmoon_conductor.inputs.body_preparation import PreparationSpec
from halfmoon_conductor.inputs.body_preparers import (
    MEMORY_BYTES,
    PreparationBudget,
    ProcessPreparer,
)
from halfmoon_conductor.inputs.preparation_messages import PreparationJob, PreparedBody
from halfmoon_conductor.routes.generation_route import MAX_INLINE_BYTES
from halfmoon_conductor.routes.rest_app import create_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_protocol.sampling import Sampling
from halfmoon_sandbox import Sandbox
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app

DEADLINE_S = 20
CARD = ModelCard(name="lab/moon", max_context=100_000, created=1_700_000_000)
LONG = "The moon is half full. " * 1000
assert len(LONG) > MAX_INLINE_BYTES
MODEL = {"model": "lab/moon"}
TURN = {"role": "user", "content": LONG}


def sandbox(tokenizer: HubTokenizer, memory_bytes: int = MEMORY_BYTES) -> Sandbox:
    spec = msgspec.msgpack.encode(PreparationSpec(tokenizer.source, "hermes"))
    factory = "halfmoon_conductor.inputs.body_preparation:make_handler"
    return Sandbox(factory, spec, memory_bytes=memory_bytes)


@pytest.fixture(scope="module")
def shared(tokenizer: HubTokenizer) -> Iterator[Sandbox]:
    """What children are forked from, loaded once."""
    with sandbox(tokenizer) as loaded:
        loaded.wait_ready()
        yield loaded


@pytest.fixture
def long_gateway(gateway: ScriptedGateway) -> ScriptedGateway:
    gateway.card = CARD
    return gateway


@asynccontextmanager
async def open_client(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, preparer: ProcessPreparer | None
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


def completion_job(prompt: str, **fields: Any) -> PreparationJob:
    content = json.dumps({**MODEL, "prompt": prompt, **fields}).encode()
    return PreparationJob("CompletionRequest", content, CARD)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": LONG}),
    "completion of several": ("/v1/completions", {"prompt": [LONG, "a"], "n": 2}),
    "completion of ids": ("/v1/completions", {"prompt": [5] * 20_000}),
    "completion with an echo": ("/v1/completions", {"prompt": LONG, "echo": True, "max_tokens": 0}),
    "chat": ("/v1/chat/completions", {"messages": [TURN]}),
    "stream": ("/v1/chat/completions", {"messages": [TURN], "stream": True}),
    "chat with tools": (
        "/v1/chat/completions",
        {
            "messages": [TURN],
            "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
        },
    ),
    "chat with a number for the template": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": "calm"}},
    ),
    "response": ("/v1/responses", {"input": LONG, "instructions": LONG}),
    "message": ("/v1/messages", {"messages": [TURN], "system": LONG, "max_tokens": 9}),
    "count": ("/v1/messages/count_tokens", {"messages": [TURN]}),
    "tokens": ("/tokenize", {"prompt": LONG, "return_token_strs": True}),
    "tokens of a chat": ("/tokenize", {"messages": [TURN]}),
    "text": ("/detokenize", {"tokens": [70] * 20_000}),
    "unknown field": ("/v1/chat/completions", {"messages": [TURN], "moon": 1}),
    "wrong field": ("/v1/completions", {"prompt": LONG, "temperature": 7}),
    "two errors": ("/v1/completions", {"prompt": ["", LONG]}),
    "unsupported": ("/v1/responses", {"input": LONG, "background": True}),
    "another model": ("/v1/completions", {"prompt": LONG, "model": "lab/sun"}),
    "too long": ("/v1/completions", {"prompt": [5] * 100_000}),
    "system in the middle": (
        "/v1/chat/completions",
        {"messages": [TURN, {"role": "system", "content": "a"}]},
    ),
    "wrong id": ("/detokenize", {"tokens": [70_000] * 20_000}),
    "deep": ("/v1/chat/completions", {"messages": [TURN], "x": eval("[" * 90 + "]" * 90)}),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_a_helper_answers_as_the_front_itself_does(
    long_gateway: ScriptedGateway,
    tokenizer: HubTokenizer,
    shared: Sandbox,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, fields = REQUESTS[what]
    body, told = {**MODEL, "seed": 1, **fields}, []
    if path not in ("/v1/completions", "/v1/chat/completions"):
        del body["seed"]
    for preparer in (ProcessPreparer(shared, 2), None):
        async with open_client(long_gateway, tokenizer, preparer) as client:
            answer = await client.post(path, json=body)
        told.append((answer.status_code, _without_chance(answer.text)))
    assert told[0] == told[1]
    requests = long_gateway.requests
    half = len(requests) // 2
    for one, other in zip(requests[:half], requests[half:], strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert _sampling(one) == _sampling(other)
        assert one.stopping == other.stopping


def _sampling(request: GenerationRequest) -> Sampling:
    return msgspec.structs.replace(request.sampling, seed=0)


def _without_chance(text: str) -> str:
    """An answer without ids and times."""
    text = "\n".join(line for line in text.splitlines() if line)
    for mark in ('"id":"', '"created":', '"created_at":'):
        parts = text.split(mark)
        text = mark.join([parts[0], *(part.lstrip("_-abcdefghijklmnopqrstuvwxyz0123456789")
                                      for part in parts[1:])])  # fmt: skip
    return text


async def test_work_over_its_time_is_ended_and_said_and_the_next_one_is_served(
    tokenizer: HubTokenizer, shared: Sandbox
) -> None:
    preparer = ProcessPreparer(shared, 2, PreparationBudget(base_s=0.1, per_mib_s=0.0))
    card = msgspec.structs.replace(CARD, max_context=10**9)
    hostile = msgspec.structs.replace(completion_job("\n \t" * 1_000_000), card=card)
    with pytest.raises(RequestTooCostly, match=r"0\.1 s of processor time") as refused:
        await preparer.prepare(hostile)
    assert refused.value.status == 400
    assert not preparer.pids, "it is not asked again"
    read = await preparer.prepare(completion_job("a"))
    assert isinstance(read, PreparedBody)
    assert read.prompts() == [tokenizer.encode("a", add_special_tokens=True)]


async def test_work_over_its_memory_is_ended_and_said(tokenizer: HubTokenizer) -> None:
    with sandbox(tokenizer, memory_bytes=64 * 1024 * 1024) as small:
        preparer = ProcessPreparer(small, 2, PreparationBudget(base_s=60))
        card = msgspec.structs.replace(CARD, max_context=10**9)
        job = msgspec.structs.replace(completion_job("a b" * 2_000_000), card=card)
        with pytest.raises(RequestTooCostly, match="memory"):
            await preparer.prepare(job)


async def test_the_work_of_a_client_that_is_gone_is_ended(
    long_gateway: ScriptedGateway, tokenizer: HubTokenizer, shared: Sandbox
) -> None:
    preparer = ProcessPreparer(shared, 2, PreparationBudget(base_s=600))
    await preparer.prepare(completion_job("a"))
    (pid,) = preparer.pids
    card = msgspec.structs.replace(CARD, max_context=10**9)
    long_gateway.card = card
    # Words of chance, which take BPE quadratic time: minutes.
    content = msgspec.structs.replace(completion_job("x" * 8_000_000), card=card).content
    async with open_client(long_gateway, tokenizer, preparer) as client:
        asking = asyncio.create_task(
            client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
        )
        await _until(lambda: not preparer.pids)
        asking.cancel()
        await _until(lambda: not _is_alive(pid))
        load = await client.get("/load")
        assert load.json() == {"server_load": 0}
        assert not long_gateway.requests


@pytest.mark.parametrize("who", ["helper", "template"])
async def test_a_helper_that_was_killed_while_idle_costs_no_request(
    tokenizer: HubTokenizer, who: str
) -> None:
    with sandbox(tokenizer) as own:
        preparer = ProcessPreparer(own, 2)
        await preparer.prepare(completion_job("a"))
        (pid,) = preparer.pids
        os.kill(pid if who == "helper" else own.pid or 0, signal.SIGKILL)
        assert isinstance(await preparer.prepare(completion_job("a")), PreparedBody)
        preparer.close()


async def test_a_helper_that_does_not_start_is_told_as_such(tokenizer: HubTokenizer) -> None:
    factory = "halfmoon_conductor.inputs.body_preparation:make_handler"
    with Sandbox(factory, b"\xff") as broken, pytest.raises(ServiceUnavailable):
        await ProcessPreparer(broken, 2).prepare(completion_job("a"))


async def test_large_bodies_leave_a_helper_to_others(
    tokenizer: HubTokenizer, shared: Sandbox
) -> None:
    preparer = ProcessPreparer(shared, 2, PreparationBudget(base_s=600))
    card = msgspec.structs.replace(CARD, max_context=10**9)
    hostile = msgspec.structs.replace(completion_job("x" * 8_000_000), card=card)
    large = [asyncio.create_task(preparer.prepare(hostile)) for _ in range(3)]
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3):
            assert isinstance(await preparer.prepare(completion_job(LONG)), PreparedBody)
    for each in large:
        each.cancel()
    await asyncio.gather(*large, return_exceptions=True)


async def test_a_text_that_can_fit_into_no_context_is_not_tokenised(
    long_gateway: ScriptedGateway, tokenizer: HubTokenizer
) -> None:
    long_gateway.card = msgspec.structs.replace(CARD, max_context=50)
    longest = tokenizer.longest_token_bytes
    assert longest == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    async with open_client(long_gateway, tokenizer, None) as client:
        for path, body in (
            ("/v1/completions", {**MODEL, "prompt": "\n" * 3000}),
            ("/v1/chat/completions", {**MODEL, "messages": [{**TURN, "content": "\n" * 3000}]}),
            ("/tokenize", {"prompt": "\n" * 3000}),
        ):
            error = (await client.post(path, json=body)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "50 tokens" in error["message"]
            assert f"{longest} bytes" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": [[]] * 30_000}}}]}, "tools"),
        ({"prediction": {"type": "content", "content": "a" * 600_000}}, "prediction"),
        ({"guided_json": {"description": "a" * 600_000}}, "guided_json"),
    ],
)  # fmt: skip
async def test_what_is_beside_the_conversation_is_bounded(
    long_gateway: ScriptedGateway, tokenizer: HubTokenizer, fields: dict[str, Any], param: str
) -> None:
    body = {**MODEL, "messages": [{"role": "user", "content": "a"}], **fields}
    async with open_client(long_gateway, tokenizer, None) as client:
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == param
    assert "524288 bytes and 20000 values" in error["message"]


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
