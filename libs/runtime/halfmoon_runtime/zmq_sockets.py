"""ZeroMQ sockets as we set them up, read them and watch them; nothing about messages.

Each socket has exactly one task that reads it, `read_until`. It waits with `poll`, which takes
nothing from the socket, and reads without waiting: so it can be stopped at any time and no
message is lost (a cancelled `recv` of zmq.asyncio may drop the one that it had in hand).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from halfmoon_protocol.codec import MAX_MESSAGE_BYTES

Frames = list[bytes]

#: Monitor events of a peer that does not speak ZeroMQ, or not our security.
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)

#: Once told to stop, a reader looks for so long whether more is on its way up from the I/O thread.
_LAST_LOOK_MS = 20
#: A reader lets other tasks run after so many messages, however fast they come.
_TURN_MESSAGES = 64
#: Longer than any link lives without being noticed as down: libzmq shall not reconnect on its
#: own, or messages of a restarted worker would follow those of the one that died.
_NEVER_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class SocketSettings:
    """What bounds a socket, in bytes, messages and seconds."""

    #: A longer frame is dropped, and one much longer closes the connection unread.
    max_message_bytes: int = MAX_MESSAGE_BYTES
    #: Messages waiting for one slow peer before a send to it is refused (PUB: dropped).
    send_queue_messages: int = 1024
    #: Messages that libzmq reads ahead from one peer; small, as each may be of the limit.
    receive_queue_messages: int = 128
    #: Decoded messages that wait for `receive`.
    inbox_messages: int = 1024
    heartbeat_interval_s: float = 1.0
    #: A peer that answers nothing for so long is gone.
    heartbeat_timeout_s: float = 3.0
    #: A link that is not connected after so long is down.
    connect_timeout_s: float = 5.0
    connect_retry_s: float = 0.1
    #: Messages still queued at close get so long to leave.
    linger_s: float = 0.2


def configure(socket: zmq.asyncio.Socket, settings: SocketSettings) -> None:
    """Set every bound on a socket, before it binds or connects."""
    socket.setsockopt(zmq.SNDHWM, settings.send_queue_messages)
    socket.setsockopt(zmq.RCVHWM, settings.receive_queue_messages)
    # The margin lets a frame that is a little too large be counted rather than cut off.
    socket.setsockopt(zmq.MAXMSGSIZE, settings.max_message_bytes + 64 * 1024)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * settings.heartbeat_interval_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * settings.heartbeat_timeout_s))
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * settings.connect_timeout_s))
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.LINGER, round(1000 * settings.linger_s))
    socket.setsockopt(zmq.IPV6, 1)


def bind_to_free_port(socket: zmq.asyncio.Socket, host: str, advertise_host: str) -> str:
    """Bind to a free TCP port of `host`; the endpoint for callers.

    Raises:
        OSError: `host` is no address of this machine, or no port is free.
    """
    try:
        socket.bind(f"tcp://{_bracketed(host)}:*")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"can't bind to a port of {host!r}: {error.strerror}") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    port = bound.rstrip(b"\0").decode().rpartition(":")[2]
    return f"tcp://{_bracketed(advertise_host)}:{port}"


def close_sockets(*sockets: zmq.asyncio.Socket) -> None:
    """Close sockets and the monitors among them, once nothing reads them; once more is fine."""
    for socket in sockets:
        if not socket.closed:
            socket.disable_monitor()
            socket.close()


async def read_until(
    socket: zmq.asyncio.Socket,
    take: Callable[[Frames], Awaitable[None]],
    stop: asyncio.Event,
) -> None:
    """Hand every message of a socket to `take`, until `stop` is set and nothing is left.

    The one reader of this socket. It may be cancelled, but then what `take` had in hand is
    lost: set `stop` and await the end to lose nothing.
    """
    raw: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
    stopping = asyncio.create_task(stop.wait())
    n_read = 0
    try:
        while True:
            frames = _receive_now(raw)
            if frames is not None:
                await take(frames)
                n_read += 1
                if n_read % _TURN_MESSAGES == 0:
                    await asyncio.sleep(0)
            elif stopping.done():
                if not await socket.poll(_LAST_LOOK_MS):
                    return
            else:
                readable = asyncio.ensure_future(socket.poll())
                try:
                    await asyncio.wait({readable, stopping}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    readable.cancel()
    finally:
        stopping.cancel()


def send_now(socket: zmq.asyncio.Socket, frames: Frames) -> Awaitable[object]:
    """Queue a message; never waits.

    Raises (when awaited):
        zmq.Again: the queue is full.
        zmq.ZMQError: EHOSTUNREACH when a ROUTER has no such peer.
    """
    return socket.send_multipart(frames, flags=zmq.NOBLOCK)


def monitor_event(frames: Frames) -> tuple[zmq.Event, str]:
    """A monitor's message: what happened, and at which endpoint."""
    message = parse_monitor_message(frames)
    return zmq.Event(message["event"]), message["endpoint"].decode(errors="replace")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _receive_now(raw: "zmq.Socket[bytes]") -> Frames | None:
    try:
        return raw.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
