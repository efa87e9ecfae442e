"""Speak HTTP with a conductor as an OpenAI client does; a stream can be hung up in the middle."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from halfmoon_conform.verdict import CheckFailed

_ANSWER_S = 60.0


@dataclass(frozen=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            raise CheckFailed(f"answered {self.status} without JSON: {self.body[:200]!r}") from None


class HttpStream:
    """One request, and its answer as it arrives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, url: str, method: str, path: str, body: Any = None) -> "HttpStream":
        """Send a request, and receive the head of the answer."""
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b"" if body is None else msgspec.json.encode(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        opened = cls(reader, writer)
        await asyncio.wait_for(opened._read_head(), _ANSWER_S)
        return opened

    async def _read_head(self) -> None:
        line = (await self._reader.readline()).decode()
        if not line.startswith("HTTP/1.1 "):
            raise CheckFailed(f"answered HTTP by {line!r}")
        self.status = int(line.split()[1])
        while (line := (await self._reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes."""
        if self.headers.get("transfer-encoding") != "chunked":
            while data := await asyncio.wait_for(self._reader.read(65_536), _ANSWER_S):
                yield data
            return
        while True:
            line = await asyncio.wait_for(self._reader.readline(), _ANSWER_S)
            if not line:
                raise CheckFailed("ended a stream without its last chunk")
            size = int(line.split(b";")[0], 16)
            data = await asyncio.wait_for(self._reader.readexactly(size + 2), _ANSWER_S)
            if size == 0:
                return
            yield data[:-2]

    async def events(self) -> AsyncIterator[Any]:
        """Yield the data of each server-sent event but the last one, `[DONE]`."""
        buffer = b""
        async for chunk in self.chunks():
            buffer += chunk
            while b"\n\n" in buffer:
                event, _, buffer = buffer.partition(b"\n\n")
                for line in event.split(b"\n"):
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        yield msgspec.json.decode(line[len(b"data: ") :])

    async def answer(self) -> HttpAnswer:
        """Receive the rest."""
        body = b"".join([chunk async for chunk in self.chunks()])
        await self.close()
        return HttpAnswer(self.status, self.headers, body)

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def request(url: str, method: str, path: str, body: Any = None) -> HttpAnswer:
    """Send a request, and receive the whole answer."""
    return await (await HttpStream.open(url, method, path, body)).answer()
