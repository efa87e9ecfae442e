"""The front behind a real server: OpenAI's own client, and clients that hang up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable

import msgspec
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import GenerationFailed, ServerOverloaded
from halfmoon_testing.conductor_http import ScriptedGateway

TEXT = "The moon 🌗 is half 半月 full."
DEADLINE_S = 10


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
    host, port = address
    async with openai.AsyncOpenAI(
        base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_openais_client_reads_whole_answers(ai: openai.AsyncOpenAI) -> None:
    completion = await ai.completions.create(model="lab/moon", prompt="Say it", max_tokens=100)
    assert completion.choices[0].text == TEXT
    assert completion.choices[0].finish_reason == "stop"
    chat = await ai.chat.completions.create(
        model="lab/moon", messages=[{"role": "user", "content": "Hello"}], temperature=0
    )
    assert chat.choices[0].message.content == TEXT
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0


async def test_openais_client_reads_streams(ai: openai.AsyncOpenAI) -> None:
    text = ""
    async for completion in await ai.completions.create(
        model="lab/moon", prompt="Say it", max_tokens=100, stream=True
    ):
        text += completion.choices[0].text
    assert text == TEXT
    text, usage = "", None
    async for chunk in await ai.chat.completions.create(
        model="lab/moon",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == TEXT
    assert usage is not None
    assert usage.completion_tokens > 5


async def test_openais_client_takes_what_an_assistant_said_back(ai: openai.AsyncOpenAI) -> None:
    chat = await ai.chat.completions.create(
        model="lab/moon", messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    message = chat.choices[0].message
    again = await ai.chat.completions.create(
        model="lab/moon",
        messages=[
            {"role": "user", "content": "Hello"},
            message,  # type: ignore[list-item]  # documented: the client writes it out
            {"role": "user", "content": "More"},
        ],
    )
    assert again.choices[0].message.content == TEXT


async def test_openais_client_knows_our_errors(
    ai: openai.AsyncOpenAI, gateway: ScriptedGateway
) -> None:
    with pytest.raises(openai.NotFoundError, match="lab/sun"):
        await ai.completions.create(model="lab/sun", prompt="Say it")
    with pytest.raises(openai.BadRequestError) as bad:
        await ai.completions.create(model="lab/moon", prompt="Say it", best_of=2)
    assert bad.value.param == "best_of"
    gateway.refusal = ServerOverloaded("busy", retry_after_s=7)
    with pytest.raises(openai.RateLimitError) as busy:
        await ai.completions.create(model="lab/moon", prompt="Say it", stream=True)
    assert busy.value.response.headers["retry-after"] == "7"
    gateway.refusal, gateway.failure = None, GenerationFailed("nobody is left")
    stream = await ai.completions.create(model="lab/moon", prompt="Say it", stream=True)
    with pytest.raises(openai.APIError, match="nobody is left"):
        async for _ in stream:
            pass


async def test_openais_client_lists_models(ai: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in ai.models.list()] == ["lab/moon"]
    assert (await ai.models.retrieve("lab/moon")).id == "lab/moon"


async def send(
    address: tuple[str, int], body: dict[str, object]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a completion by hand."""
    reader, writer = await asyncio.open_connection(*address)
    content = json.dumps({"model": "lab/moon", "prompt": "a", **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: front\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def test_a_body_that_announces_too_many_bytes_is_not_waited_for(
    address: tuple[str, int],
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: front\r\n"
        b"content-type: application/json\r\ncontent-length: 999999999\r\n\r\n"
    )
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.read()  # to the end: the server closes the connection
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer
    writer.close()


async def hang_up_in_mid_stream(address: tuple[str, int], **body: object) -> None:
    """Reset the connection once the first event is there."""
    reader, writer = await send(address, {"stream": True, **body})
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b"data: ")
    writer.transport.abort()


async def test_a_client_gone_in_mid_stream_cancels_its_generation(
    address: tuple[str, int], gateway: ScriptedGateway, registry: CollectorRegistry
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


async def test_a_client_gone_from_a_torrent_of_tokens_cancels_its_generation(
    address: tuple[str, int], gateway: ScriptedGateway, card: ModelCard
) -> None:
    gateway.script = [70]
    gateway.card = msgspec.structs.replace(card, max_context=100_000_000)
    await hang_up_in_mid_stream(address, max_tokens=90_000_000)
    await until(lambda: gateway.cancelled)
    assert not gateway.live


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gone_before_its_answer_cancels_its_generation(
    address: tuple[str, int], gateway: ScriptedGateway, stream: bool
) -> None:
    gateway.n_before_pause = 0 if stream else 2
    _, writer = await send(address, {"stream": stream})
    await until(lambda: gateway.live)
    writer.transport.abort()
    await until(lambda: gateway.cancelled)
    assert not gateway.live


async def test_a_client_that_does_not_read_stops_its_generation_from_being_read(
    address: tuple[str, int], gateway: ScriptedGateway, card: ModelCard
) -> None:
    """What nobody takes is not piled up here: the stream waits for its reader."""
    gateway.script = [70]
    gateway.card = msgspec.structs.replace(card, max_context=100_000_000)
    reader, writer = await send(address, {"stream": True, "max_tokens": 90_000_000})
    await reader.readuntil(b"data: ")
    said = -1
    async with asyncio.timeout(60):
        while said != gateway.n_said:  # until the sockets' buffers are full
            said = gateway.n_said
            await asyncio.sleep(0.3)
    assert gateway.live
    writer.transport.abort()
    await until(lambda: gateway.cancelled)


async def test_other_clients_go_on_when_one_is_gone(
    address: tuple[str, int], ai: openai.AsyncOpenAI, gateway: ScriptedGateway
) -> None:
    gateway.n_before_pause = 3
    other = asyncio.create_task(
        ai.completions.create(model="lab/moon", prompt="Say it", max_tokens=100)
    )
    await hang_up_in_mid_stream(address)
    await until(lambda: gateway.cancelled)
    gateway.resume.set()
    assert (await other).choices[0].text == TEXT
