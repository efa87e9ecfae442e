"""Configure, bind, read and monitor ZeroMQ sockets; messages are not decoded here.

Each socket has exactly one task that reads it, `ZmqSocket.read_until`. The task reads without
waiting, and waits for the socket's descriptor, which takes nothing from the socket. So it can be
stopped at any time and no message is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from halfmoon_protocol.codec import MAX_MESSAGE_BYTES

Frames = list[bytes]

#: Monitor events of a peer that does not speak ZeroMQ, or uses another security mechanism.
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)

#: Seconds that a stopping reader waits for messages still on their way from the I/O thread.
_LATE_MESSAGE_S = 0.02
#: Messages after which a reader lets other tasks run, however fast messages arrive.
_BATCH_MESSAGES = 64
#: Reconnect interval, longer than any link stays up unnoticed after a loss. libzmq must not
#: reconnect on its own: messages of a restarted worker would follow those of the dead one.
_NEVER_MS = 24 * 3600 * 1000


@dataclass(frozen=True)
class SocketSettings:
    """Bounds of a socket, in bytes, messages and seconds."""

    #: A longer frame is dropped; a much longer one closes the connection unread.
    max_message_bytes: int = MAX_MESSAGE_BYTES
    #: Messages queued for one slow peer. When the queue is full, a send waits (ROUTER), is
    #: refused (DEALER) or drops the message (PUB).
    send_queue_messages: int = 1024
    #: Messages that libzmq reads ahead from one peer; few, as each may be of the largest size.
    receive_queue_messages: int = 128
    #: Decoded messages queued for `receive`.
    inbox_messages: int = 1024
    heartbeat_interval_s: float = 1.0
    #: Seconds without an answer after which a peer counts as gone.
    heartbeat_timeout_s: float = 3.0
    #: Seconds after which a link that is not connected is down.
    connect_timeout_s: float = 5.0
    connect_retry_s: float = 0.1
    #: Seconds that messages still queued at the close have to leave.
    linger_s: float = 0.2


def configure(socket: "zmq.Socket[bytes]", settings: SocketSettings) -> None:
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


def bind_to_free_port(socket: "zmq.Socket[bytes]", host: str, advertise_host: str) -> str:
    """Bind to a free TCP port of `host`, and return the endpoint for callers.

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


def close_sockets(*sockets: "zmq.Socket[bytes]") -> None:
    """Close sockets and monitors that no task reads any more; closing twice does no harm."""
    for socket in sockets:
        if not socket.closed:
            socket.disable_monitor()
            socket.close()


class ZmqSocket:
    """Connect a socket, served by libzmq's threads, to the event loop."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        #: Set when messages may be readable.
        self._maybe_readable = asyncio.Event()

    def send_now(self, frames: Frames) -> None:
        """Queue a message without waiting.

        Raises:
            zmq.Again: the queue is full.
            zmq.ZMQError: EHOSTUNREACH when a ROUTER has no such peer.
        """
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            # A send, even a failed one, may consume the descriptor's signal that a message arrived
            # or that the peer left. A peer whose queue is full counts as connected until this
            # check has found that nothing more comes from it.
            if self._has_message():
                self._maybe_readable.set()

    async def read_until(
        self, take: Callable[[Frames], Awaitable[None]], stop: asyncio.Event
    ) -> None:
        """Hand every message of a socket to `take`, until `stop` is set and nothing is left.

        This is the only reader of the socket. A cancellation loses the message that `take` was
        handling: set `stop` and await the end to lose nothing.
        """
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._maybe_readable.set())
        n_read = 0
        try:
            while True:
                self._maybe_readable.clear()
                frames = self._receive_now()
                if frames is not None:
                    await take(frames)
                    n_read += 1
                    if n_read % _BATCH_MESSAGES == 0:
                        await asyncio.sleep(0)
                elif not stopping.done():
                    await self._wait_readable()
                elif not await self._has_late_message():
                    return
        finally:
            stopping.cancel()

    async def _wait_readable(self) -> None:
        """Wait until messages may have arrived.

        The descriptor is watched only meanwhile: it stays readable until the socket is read.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._maybe_readable.set)
        try:
            await self._maybe_readable.wait()
        finally:
            loop.remove_reader(self._descriptor)

    async def _has_late_message(self) -> bool:
        """Return whether another message arrives from the I/O thread within `_LATE_MESSAGE_S`."""
        try:
            async with asyncio.timeout(_LATE_MESSAGE_S):
                while not self._has_message():
                    self._maybe_readable.clear()
                    await self._wait_readable()
        except TimeoutError:
            return False
        return True

    def _has_message(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive_now(self) -> Frames | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


def monitor_event(frames: Frames) -> tuple[zmq.Event, str]:
    """Parse a monitor's message into the event and its endpoint."""
    message = parse_monitor_message(frames)
    return zmq.Event(message["event"]), message["endpoint"].decode(errors="replace")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
