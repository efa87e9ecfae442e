"""Play a worker's two sockets to a subject that connects: take commands, answer, publish."""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq

from halfmoon_conform.pattern_matcher import difference
from halfmoon_conform.peers.caller import ANSWER_S
from halfmoon_conform.peers.curve_sockets import Context, bind_free_port, open_socket, secure_port
from halfmoon_conform.peers.wire_maps import WireMap, decode_frame, encode_map
from halfmoon_conform.verdict import CheckFailed
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.cluster_keys import cluster_key_id

#: Handles a command of a caller; returns whether it is done with it.
CommandHandler = Callable[[bytes, WireMap], Awaitable[bool]]


class PlayedPort:
    """A ROUTER for commands and a PUB for events, with the record of a worker."""

    def __init__(self, context: Context, cluster_key: str, record: WireMap) -> None:
        self._commands = open_socket(context, zmq.ROUTER)
        self._events = open_socket(context, zmq.PUB)
        for socket in (self._commands, self._events):
            secure_port(socket, cluster_key)
        self.record: WireMap = {
            "generation": 1,
            "host": "conform",
            **record,
            "commands": bind_free_port(self._commands),
            "events": bind_free_port(self._events),
        }
        if cluster_key:
            self.record["key_id"] = cluster_key_id(cluster_key)
        #: Commands that nothing has taken, with their callers, oldest first.
        self.inbox: list[tuple[bytes, WireMap]] = []
        #: Every command that came, for checks of what was not sent.
        self.received: list[WireMap] = []
        self.handler: CommandHandler | None = None
        #: What the subject did against the protocol, if anything.
        self.faults: list[str] = []
        self._arrived = asyncio.Condition()
        self._sequence = -1
        self._reader = asyncio.create_task(self._read())

    @property
    def address(self) -> WireMap:
        """Return the address of this port as messages name a kvstore or a stage."""
        named = ("worker_id", "generation", "commands", "key_id")
        return {name: self.record[name] for name in named if name in self.record}

    async def register(self, store: MetadataStore) -> None:
        """Publish the record."""
        key = f"halfmoon/members/{self.record['worker_id']}"
        value = msgspec.json.encode(self.record)
        await asyncio.to_thread(store.put, key, value, ttl_s=600.0)

    async def send(self, caller: bytes, message: WireMap) -> None:
        """Answer a caller."""
        await self._commands.send_multipart([caller, encode_map(message)])

    async def send_frame(self, caller: bytes, frame: bytes) -> None:
        """Send a caller one frame as it is."""
        await self._commands.send_multipart([caller, frame])

    async def publish(self, message: WireMap) -> None:
        """Publish a report of the load."""
        await self._events.send_multipart([b"load", encode_map(message)])

    async def publish_events(self, events: list[WireMap], *, skip: int = 0) -> int:
        """Publish KV events with the next number, or a later one; return the number."""
        self._sequence += 1 + skip
        await self._events.send_multipart(
            [
                f"kv@{self.record['worker_id']}".encode(),
                struct.pack(">q", self._sequence),
                msgspec.msgpack.encode([0.0, events, None]),
            ]
        )
        return self._sequence

    @property
    def sequence(self) -> int:
        """Return the number of the last KV event; -1: none."""
        return self._sequence

    async def expect(
        self, pattern: WireMap, *, within_s: float = ANSWER_S
    ) -> tuple[bytes, WireMap]:
        """Take the first command that matches, and its caller.

        Raises:
            CheckFailed: none came in time.
        """
        found: list[tuple[bytes, WireMap]] = []

        def look() -> bool:
            for each in self.inbox:
                if not difference(pattern, each[1]):
                    found.append(each)
                    self.inbox.remove(each)
                    return True
            return False

        async with self._arrived:
            try:
                await asyncio.wait_for(self._arrived.wait_for(look), within_s)
            except TimeoutError:
                came = ", ".join(str(m.get("type")) for m in self.received[-6:]) or "nothing"
                worker = self.record["worker_id"]
                raise CheckFailed(
                    f"sent {worker} no {pattern!r:.200} within {within_s:g} s; it sent {came}"
                ) from None
        return found[0]

    def has_received(self, pattern: WireMap) -> bool:
        """Return whether a command like this ever came."""
        return any(not difference(pattern, message) for message in self.received)

    @property
    def closed(self) -> bool:
        """Return whether its sockets are closed."""
        return bool(self._commands.closed)

    async def close(self) -> None:
        """Close both sockets."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        for socket in (self._commands, self._events):
            socket.close(linger=0)

    async def _read(self) -> None:
        while True:
            caller, *frames = await self._commands.recv_multipart()
            try:
                message: Any = decode_frame(frames[0])
            except CheckFailed as fault:
                self.faults.append(str(fault))
                continue
            async with self._arrived:
                self.received.append(message)
            try:
                done = self.handler is not None and await self.handler(caller, message)
            except CheckFailed as fault:
                # The check sees it where it waits for what this message should have led to.
                self.faults.append(str(fault))
                continue
            async with self._arrived:
                if not done:
                    self.inbox.append((caller, message))
                self._arrived.notify_all()
