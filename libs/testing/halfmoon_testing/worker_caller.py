"""Send arbitrary and malformed messages to workers, for tests."""

import asyncio
import math
from collections.abc import Iterator
from random import Random
from typing import Any, Self

import msgspec

from halfmoon_protocol import codec
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink

#: Replacements of numbers: small ones, powers of two and beyond, and values that are no numbers.
_NUMBERS: tuple[float | int, ...] = (
    0, 1, -1, 2, 3, 15, 16, 17, 31, 997, 4095, 4096, 4097, 2**16, 2**31, 2**32 - 1, 2**32, 2**40,
    2**47, 2**53, 2**63, -(2**31), -(2**63), 0.5, -0.5, 1e-300, 1e9, 1e308,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
_TEXTS = ("", "x", "decode-0", "prefill-0", "kvstore-0", "conductor-0", "\0", "ü" * 300, "x" * 5000)


class WorkerCaller:
    """Hold one connection to a worker, and keep all messages that it receives."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link
        self.received: list[AnyMessage | KvEventBatch] = []
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def dial(cls, network: Network, commands: str, events: str | None = None) -> Self:
        """Connect to a worker."""
        return cls(await network.dial(commands, events))

    async def send(self, *messages: Message) -> None:
        """Send messages in order."""
        for message in messages:
            await self.link.send(message)

    async def wait_for(self, kind: type[Message], n: int = 1, timeout_s: float = 60.0) -> list[Any]:
        """Wait for the first `n` messages of a kind, and return them."""
        async with asyncio.timeout(timeout_s):
            while len(found := [m for m in self.received if isinstance(m, kind)]) < n:
                self._news.clear()
                await self._news.wait()
        return found[:n]

    async def close(self) -> None:
        """Close the connection."""
        self._reader.cancel()
        await self.link.close()

    async def _read(self) -> None:
        try:
            while True:
                self.received.append(await self.link.receive())
                self._news.set()
        except PeerUnreachable:
            pass


def mutate_message(message: Message, random: Random) -> AnyMessage | None:
    """Replace one or two values of a message; return None if no receiver would decode it."""
    fields = msgspec.msgpack.decode(codec.encode(message)[1:])
    for _ in range(random.choice((1, 1, 2))):
        places = [path for path in _places(fields) if path != ("type",)]
        if places:
            fields = _replaced(fields, random.choice(places), random)
    try:
        return codec.decode(bytes([codec.VERSION]) + msgspec.msgpack.encode(fields))
    except (ProtocolError, OverflowError):
        return None


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a message, inside lists and maps too."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) // 2, len(value) - 1} if value else ()):
            yield from _places(value[i], (*path, i))


def _replaced(value: Any, path: tuple[Any, ...], random: Random) -> Any:
    if not path:
        return _other(value, random)
    key, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, key: _replaced(value[key], rest, random)}
    return [*value[:key], _replaced(value[key], rest, random), *value[key + 1 :]]


def _other(value: Any, random: Random) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return random.choice(_NUMBERS)
        case str():
            return random.choice(_TEXTS)
        case bytes():
            return random.choice((b"", b"\0", value[::-1], value * 3, bytes(len(value))))
        case list():
            return random.choice(([], value * 2, value[::-1], value[:-1], [*value[1:], *value[:1]]))
        case _:
            return random.choice((None, {}, 0))
