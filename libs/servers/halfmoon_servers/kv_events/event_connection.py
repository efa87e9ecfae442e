"""Hold the sockets to one server's KV events: SUB for batches, DEALER for replays.

A connection is up once and never reconnects: batches of a restarted server must not follow those
of the earlier one unnoticed. Frames are bounded by libzmq. Those that wait to be read are bounded
here: a server that sends more is hung up on, and asked again.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from halfmoon_runtime.channels.socket_pump import Frames, SocketPump
from halfmoon_runtime.channels.zmq_sockets import (
    HANDSHAKE_FAILED,
    SocketSettings,
    close_sockets,
    configure,
    monitor_event,
)
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint
from halfmoon_servers.kv_events.payload_decoder import MAX_PAYLOAD_BYTES

#: Messages and bytes that wait to be read, replays included: more than servers keep for them.
_MAX_UNREAD = 64 * 1024
_MAX_UNREAD_BYTES = 256 * 1024 * 1024
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | HANDSHAKE_FAILED
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Published:
    """A batch that was published just now."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Replayed:
    """A batch of the replay that was requested last."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """The server has sent all batches that it still has."""


@dataclass(frozen=True, slots=True)
class ConnectionUp:
    """Batches that are published from now on arrive, soon after."""


@dataclass(frozen=True, slots=True)
class ConnectionDown:
    """The server is gone."""


Note = Published | Replayed | ReplayEnded | ConnectionUp | ConnectionDown


class EventConnection:
    """One connection to the endpoints of a server."""

    def __init__(self, endpoint: EventEndpoint) -> None:
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._settings = SocketSettings(max_message_bytes=MAX_PAYLOAD_BYTES)
        self._notes: deque[Note] = deque()
        #: Bytes of their payloads.
        self._n_bytes = 0
        self._arrived = asyncio.Event()
        #: Messages that were none of the protocol.
        self.n_malformed = 0
        self._pumps: list[SocketPump] = []
        self._sub = self._socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        self._monitor = self._sub.get_monitor_socket(_WATCHED)
        self._replay_pump: SocketPump | None = None

    def open(self) -> None:
        """Connect; a `ConnectionUp` or `ConnectionDown` follows.

        Raises:
            OSError: the endpoint can't be connected to at all.
        """
        self._start(self._monitor, self._on_monitor)
        self._start(self._sub, self._on_published)
        _connect(self._sub, self._endpoint.endpoint)

    def close(self) -> None:
        """Close the sockets; nothing more is noted."""
        for pump in self._pumps:
            pump.stop()
        close_sockets(*(pump.socket for pump in self._pumps), self._sub, self._monitor)
        self._pumps = []

    async def next(self, timeout_s: float | None) -> Note | None:
        """Return what happened next; None: nothing within `timeout_s`."""
        if not self._notes:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        note = self._notes.popleft()
        self._n_bytes -= _payload_bytes(note)
        return note

    def ask_replay(self, start: int) -> None:
        """Request all batches from this number on, over a socket of their own.

        Raises:
            OSError: the endpoint can't be connected to at all.
        """
        assert self._endpoint.replay_endpoint is not None
        self.end_replay()
        dealer = self._socket(zmq.DEALER)
        self._replay_pump = self._start(dealer, self._on_replayed)
        _connect(dealer, self._endpoint.replay_endpoint)
        self._replay_pump.send_now(b"", start.to_bytes(8, "big"))

    def end_replay(self) -> None:
        """Close the socket of a replay, if there is one, and drop what has come of it."""
        if (pump := self._replay_pump) is not None:
            self._notes = deque(
                note for note in self._notes if not isinstance(note, Replayed | ReplayEnded)
            )
            self._n_bytes = sum(map(_payload_bytes, self._notes))
            pump.stop()
            self._pumps.remove(pump)
            close_sockets(pump.socket)
            self._replay_pump = None

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        configure(socket, self._settings)
        return socket

    def _start(self, socket: "zmq.Socket[bytes]", take: Callable[[Frames], None]) -> SocketPump:
        pump = SocketPump(socket)
        self._pumps.append(pump)
        pump.start(take, on_failure=self._on_failure)
        return pump

    def _note(self, note: Note) -> None:
        n_bytes = self._n_bytes + _payload_bytes(note)
        if len(self._notes) >= _MAX_UNREAD or n_bytes > _MAX_UNREAD_BYTES:
            for pump in self._pumps:
                pump.stop()
            note = ConnectionDown()
        self._notes.append(note)
        self._n_bytes += _payload_bytes(note)
        self._arrived.set()

    def _on_failure(self) -> None:
        self._note(ConnectionDown())

    def _on_monitor(self, frames: Frames) -> None:
        event, _ = monitor_event(frames)
        up = event == zmq.Event.HANDSHAKE_SUCCEEDED
        self._note(ConnectionUp() if up else ConnectionDown())

    def _on_published(self, frames: Frames) -> None:
        if len(frames) == 3 and len(frames[1]) == 8:
            self._note(Published(int.from_bytes(frames[1], "big"), frames[2]))
        else:
            self.n_malformed += 1

    def _on_replayed(self, frames: Frames) -> None:
        """Take ``["", topic, number, payload]`` of vLLM, or SGLang's, which has no topic."""
        if not 3 <= len(frames) <= 4 or len(frames[-2]) != 8:
            self.n_malformed += 1
        elif frames[-2] == _END_OF_REPLAY:
            self._note(ReplayEnded())
        else:
            sequence = int.from_bytes(frames[-2], "big")
            self._note(Replayed(sequence, frames[-1]))


def _payload_bytes(note: Note) -> int:
    return len(note.payload) if isinstance(note, Published | Replayed) else 0


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{endpoint}: {error.strerror}") from None
