"""The front behind a real server: OpenAI's own client, and clients that hang up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from openai.types.chat import ChatCompletionUserMessageParam
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import GenerationFailed, ServerOverloaded
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import TEXT

DEADLINE_S = 10
MODEL = "lab/moon"
HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello"}


@pytest.fixture
async def address(app: FastAPI) -> AsyncIterator[tuple[str, int]]:
    """A server of the app, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()
    server.should_exit = True
    await serving


@pytest.fixture
async def ai(address: tuple[str, int]) -> AsyncIterator[openai.AsyncOpenAI]:
    url = "http://{}:{}/v1".format(*address)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def endless(gateway: ScriptedGateway, card: ModelCard) -> None:
    """A model that goes on for longer than all buffers hold."""
    gateway.script = [70]
    gateway.card = msgspec.structs.replace(card, max_context=100_000_000)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_openais_client_reads_whole_answers_and_streams_and_lists_models(
    ai: openai.AsyncOpenAI,
) -> None:
    completion = await ai.completions.create(model=MODEL, prompt="Say it", max_tokens=100)
    assert completion.choices[0].text == TEXT
    assert completion.choices[0].finish_reason == "stop"
    text = ""
    async for part in await ai.completions.create(
        model=MODEL, prompt="Say it", max_tokens=100, stream=True
    ):
        text += part.choices[0].text
    assert text == TEXT
    chat = await ai.chat.completions.create(model=MODEL, messages=[HELLO], temperature=0)
    message = chat.choices[0].message
    assert message.content == TEXT
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0
    # What an assistant said is taken back, as the client writes it out.
    text, usage = "", None
    parts: ChatCompletionUserMessageParam = {
        "role": "user", "content": [{"type": "text", "text": "More"}],
    }  # fmt: skip
    async for chunk in await ai.chat.completions.create(
        model=MODEL,
        messages=cast("Any", [HELLO, message, parts]),
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == TEXT
    assert usage is not None and usage.completion_tokens > 5
    assert [model.id async for model in ai.models.list()] == [MODEL]
    assert (await ai.models.retrieve(MODEL)).id == MODEL


async def test_openais_client_knows_our_errors(
    ai: openai.AsyncOpenAI, gateway: ScriptedGateway
) -> None:
    with pytest.raises(openai.NotFoundError, match="lab/sun"):
        await ai.completions.create(model="lab/sun", prompt="Say it")
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.completions.create(model=MODEL, prompt="Say it", best_of=2)
    assert bad.value.param == "best_of"
    gateway.refusal = ServerOverloaded("busy", retry_after_s=7)
    with pytest.raises(openai.RateLimitError) as busy:
        await ai.completions.create(model=MODEL, prompt="Say it", stream=True)
    assert busy.value.response.headers["retry-after"] == "7"
    gateway.refusal, gateway.failure = None, GenerationFailed("nobody is left")
    stream = await ai.completions.create(model=MODEL, prompt="Say it", stream=True)
    with pytest.raises(openai.APIError, match="nobody is left"):
        async for _ in stream:
            pass


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begin_stream(address: tuple[str, int], **body: object) -> Connection:
    """Ask for a stream by hand, and read its first event. What is not held on to is closed."""
    reader, writer = await asyncio.open_connection(*address)
    content = json.dumps({"model": MODEL, "prompt": "a", "stream": True, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: front\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b"data: ")
    return reader, writer


async def hang_up_in_mid_stream(address: tuple[str, int], **body: object) -> None:
    _, writer = await begin_stream(address, **body)
    writer.transport.abort()


async def test_a_client_gone_in_mid_stream_cancels_its_generation(
    address: tuple[str, int],
    ai: openai.AsyncOpenAI,
    gateway: ScriptedGateway,
    registry: CollectorRegistry,
) -> None:
    def n_aborted() -> float | None:
        name, labels = "halfmoon_request_success_total", {"finished_reason": "abort"}
        return registry.get_sample_value(name, labels)

    gateway.n_before_pause = 3  # then nothing is sent that could fail
    await hang_up_in_mid_stream(address)
    await until(lambda: gateway.cancelled)
    assert not gateway.live
    await until(lambda: n_aborted() == 1)
    assert gateway.cancelled == [gateway.requests[0].request_id]
    # Other clients go on when one is gone.
    asking = ai.completions.create(model=MODEL, prompt="Say it", max_tokens=100)
    other = asyncio.create_task(asking)
    await until(lambda: gateway.live)
    await hang_up_in_mid_stream(address)
    await until(lambda: len(gateway.cancelled) == 2)
    gateway.resume.set()
    assert (await other).choices[0].text == TEXT


@pytest.mark.usefixtures("endless")
async def test_a_client_gone_from_a_torrent_of_tokens_cancels_its_generation(
    address: tuple[str, int], gateway: ScriptedGateway
) -> None:
    await hang_up_in_mid_stream(address, max_tokens=90_000_000)
    await until(lambda: gateway.cancelled)
    assert not gateway.live


@pytest.mark.usefixtures("endless")
async def test_a_client_that_does_not_read_stops_its_generation_from_being_read(
    address: tuple[str, int], gateway: ScriptedGateway
) -> None:
    """What nobody takes is not piled up here: the stream waits for its reader."""
    reader, writer = await begin_stream(address, max_tokens=90_000_000)
    said = -1
    async with asyncio.timeout(60):
        while said != gateway.n_said:  # until the sockets' buffers are full
            said = gateway.n_said
            await asyncio.sleep(0.3)
    assert gateway.live and not reader.at_eof()
    writer.transport.abort()
    await until(lambda: gateway.cancelled)
