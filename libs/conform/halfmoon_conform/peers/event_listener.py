"""Listen to what a worker publishes: load reports and KV events."""

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from halfmoon_conform.peers.curve_sockets import (
    Context,
    HandshakeWatch,
    open_socket,
    secure_caller,
)
from halfmoon_conform.peers.wire_maps import WireMap, decode_frame
from halfmoon_conform.verdict import CheckFailed

_EVENT_S = 20.0
#: Frames of a publication of KV events.
_KV_FRAMES = 3


class EventListener:
    """One subscription to everything that a worker publishes."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        worker_id: str,
        cluster_key: str,
        event_s: float = _EVENT_S,
    ) -> None:
        self._event_s = event_s
        self._socket = open_socket(context, zmq.SUB)
        secure_caller(self._socket, cluster_key)
        self._handshakes = HandshakeWatch(self._socket, cluster_key)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._topic = f"kv@{worker_id}".encode()
        self.loads: list[WireMap] = []
        #: Sequence number and events of each publication.
        self.publications: list[tuple[int, list[WireMap]]] = []
        self._heard = False
        self._fault: CheckFailed | None = None
        self._arrived = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def wait_for(
        self, seen: Callable[[], bool], what: str, within_s: float | None = None
    ) -> None:
        """Wait until a condition on what was published holds.

        Raises:
            CheckFailed: it does not hold in time, or a publication is malformed.
        """
        limit_s = self._event_s if within_s is None else within_s
        async with self._arrived:
            try:
                await asyncio.wait_for(
                    self._arrived.wait_for(lambda: self._fault is not None or seen()), limit_s
                )
            except TimeoutError:
                why = f"; the last load: {self.loads[-1]}" if self.loads else ""
                if not self._heard:
                    why = await self._handshakes.fault()
                raise CheckFailed(f"published no {what} within {limit_s:g} s{why}") from None
        if self._fault is not None:
            raise self._fault

    def events(self) -> list[WireMap]:
        """Return all KV events, in order."""
        return [event for _, events in self.publications for event in events]

    async def close(self) -> None:
        """End the subscription."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._handshakes.close()
        self._socket.close(linger=0)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard = True
            async with self._arrived:
                try:
                    self._take(frames)
                except CheckFailed as fault:
                    self._fault = self._fault or fault
                self._arrived.notify_all()

    def _take(self, frames: list[bytes]) -> None:
        if frames[0] == b"load" and len(frames) == 2:
            self.loads.append(decode_frame(frames[1]))
        elif frames[0] == self._topic and len(frames) == _KV_FRAMES:
            self.publications.append((_sequence(frames[1]), _events(frames[2])))
        else:
            raise CheckFailed(
                f"published {len(frames)} frames under {frames[0]!r}: loads are 2 under b'load',"
                f" KV events are {_KV_FRAMES} under {self._topic!r}"
            )


def _sequence(frame: bytes) -> int:
    if len(frame) != 8:
        raise CheckFailed(f"a sequence number of {len(frame)} bytes, it has 8")
    return int(struct.unpack(">q", frame)[0])


def _events(payload: bytes) -> list[WireMap]:
    try:
        rows: Any = msgspec.msgpack.decode(payload)
        _, events = rows[:2]
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise CheckFailed(
            "KV events that are no array [timestamp, [event, …], null] of MessagePack: "
            f"{error}; they begin with {payload[:24].hex(' ')}"
        ) from None
    if not all(isinstance(each, dict) and "type" in each for each in events):
        raise CheckFailed(f"KV events that are no maps with a type: {events!r:.200}")
    return list(events)
