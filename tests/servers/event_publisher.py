"""Publish KV events as vLLM and SGLang do: PUB for batches, ROUTER for replays."""

import asyncio
import errno
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from halfmoon_servers.kv_events.event_endpoint import EventEndpoint

TOPIC = "kv@tiny"


class EventPublisher:
    """A server's publisher; a new one at the same ports is a restarted server."""

    def __init__(self, *, ports: tuple[int, int] | None = None, sglang: bool = False) -> None:
        self._context: Any = zmq.asyncio.Context.instance()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._sglang = sglang
        self.ports = (
            self._bind(self._pub, ports and ports[0]),
            self._bind(self._router, ports and ports[1]),
        )
        self.batches: list[bytes] = []
        #: Batches that a replay still has.
        self.first_kept = 0
        #: The start of each replay that was requested.
        self.replays: list[int] = []
        self.answers_replays = True
        self._task = asyncio.create_task(self._serve_replays())

    @property
    def endpoint(self) -> EventEndpoint:
        events, replays = self.ports
        return EventEndpoint(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replays}", TOPIC)

    async def subscribed(self) -> None:
        """Wait until a subscriber is there."""
        assert await asyncio.wait_for(self._pub.recv(), 30) == b"\x01" + TOPIC.encode()

    async def publish(self, *events: Sequence[Any], lost: bool = False, raw: bytes = b"") -> None:
        """Publish one batch; a lost one can only be replayed."""
        payload = raw or msgspec.msgpack.encode([float(len(self.batches)), events, 0])
        self.batches.append(payload)
        if not lost:
            number = (len(self.batches) - 1).to_bytes(8, "big")
            await self._pub.send_multipart([TOPIC.encode(), number, payload])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def _serve_replays(self) -> None:
        while True:
            peer, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            if not self.answers_replays:
                continue
            topic = [] if self._sglang else [TOPIC.encode()]
            for number, payload in enumerate(self.batches):
                if number >= max(self.first_kept, self.replays[-1]):
                    frames = [peer, b"", *topic, number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([peer, b"", *(b"" for _ in topic), end, b""])

    def _bind(self, socket: Any, port: int | None) -> int:
        if port is None:
            return int(socket.bind_to_random_port("tcp://127.0.0.1"))
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.01)  # libzmq's own thread closes the earlier one
            else:
                return port
