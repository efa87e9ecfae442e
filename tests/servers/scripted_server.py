"""An HTTP server whose answers are written byte by byte by a test."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from halfmoon_servers.client.server_client import ServerClient

MODELS = {
    "data": [{"id": "tiny", "owned_by": "vllm", "root": "/models/tiny", "max_model_len": 512}]
}
CACHE_INFO = (
    b'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0\n'
    b'vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="101"} 1.0\n'
)


@dataclass
class ReceivedRequest:
    """One request, and the writer for its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def answer(
        self, body: bytes, status: int = 200, headers: str = "", length: int | None = None
    ) -> None:
        n_bytes = len(body) if length is None else length
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {n_bytes}\r\n{headers}\r\n"
        await self.write(head.encode() + body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until_left(self) -> None:
        """Wait until the client has closed the connection."""
        while await self.reader.read(1000):
            pass

    def abort(self) -> None:
        """Close the connection in the middle, as a killed process does."""
        self.writer.transport.abort()

    async def begin_stream(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )

    async def event(self, data: object) -> None:
        text = data if isinstance(data, bytes) else b"data: " + json.dumps(data).encode() + b"\n\n"
        await self.write(b"%x\r\n%b\r\n" % (len(text), text))

    async def end_stream(self) -> None:
        await self.event(b"data: [DONE]\n\n")
        await self.write(b"0\r\n\r\n")


Handler = Callable[[ReceivedRequest], Awaitable[None]]


@dataclass
class ScriptedServer:
    """The address, the answers by path, and what was received."""

    url: str
    handlers: dict[str, Handler] = field(default_factory=dict)
    received: list[ReceivedRequest] = field(default_factory=list)
    n_connections: int = 0
    client: ServerClient = field(init=False)

    def on(self, path: str, answer: Handler | bytes | dict[str, Any]) -> None:
        """Answer requests to a path."""
        if isinstance(answer, dict):
            answer = json.dumps(answer).encode()
        if isinstance(answer, bytes):
            data = answer

            async def answer_bytes(request: ReceivedRequest) -> None:
                await request.answer(data)

            answer = answer_bytes
        self.handlers[path] = answer


@asynccontextmanager
async def scripted_server() -> AsyncGenerator[ScriptedServer, None]:
    """Serve as a vLLM without requests, until told otherwise."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script.n_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")[:-2]
                headers = {
                    name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                request = ReceivedRequest(method, path, headers, body, reader, writer)
                script.received.append(request)
                if (handler := script.handlers.get(path)) is None:
                    await request.answer(b'{"detail":"Not Found"}', status=404)
                else:
                    await handler(request)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = ScriptedServer(f"http://127.0.0.1:{port}")
    script.on("/v1/models", MODELS)
    script.on("/metrics", CACHE_INFO)
    script.on("/version", {"version": "0.32.0"})
    script.on("/health", b"")
    async with server:
        yield script
