"""ZeroMQ sockets as we set them up, read them and watch them; nothing about messages.

Each socket has exactly one task that reads it, `ZmqSocket.read_until`. It reads without waiting,
and
waits for the socket's descriptor, which takes nothing from the socket: so it can be stopped at
any time and no message is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
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
_LAST_LOOK_S = 0.02
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
    #: Messages waiting for one slow peer before a send to it waits (ROUTER), is refused (DEALER)
    #: or drops the message (PUB).
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


def close_sockets(*sockets: "zmq.Socket[bytes]") -> None:
    """Close sockets and the monitors among them, once nothing reads them; once more is fine."""
    for socket in sockets:
        if not socket.closed:
            socket.disable_monitor()
            socket.close()


class ZmqSocket:
    """A socket between our event loop and libzmq's threads."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._descriptor = int(socket.getsockopt(zmq.FD))
        #: Set when there may be something to read.
        self._stirred = asyncio.Event()

    def send_now(self, frames: Frames) -> None:
        """Queue a message; never waits.

        Raises:
            zmq.Again: the queue is full.
            zmq.ZMQError: EHOSTUNREACH when a ROUTER has no such peer.
        """
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        finally:
            # Sending, in vain too, may have seen that something arrived, or that the peer left:
            # the descriptor does not tell it again. A peer whose queue is full stays until this
            # look has found that nothing more comes from it.
            if self._has_mail():
                self._stirred.set()

    async def read_until(
        self, take: Callable[[Frames], Awaitable[None]], stop: asyncio.Event
    ) -> None:
        """Hand every message of a socket to `take`, until `stop` is set and nothing is left.

        The one reader of this socket. It may be cancelled, but then what `take` had in hand is
        lost: set `stop` and await the end to lose nothing.
        """
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._stirred.set())
        n_read = 0
        try:
            while True:
                self._stirred.clear()
                frames = self._receive_now()
                if frames is not None:
                    await take(frames)
                    n_read += 1
                    if n_read % _TURN_MESSAGES == 0:
                        await asyncio.sleep(0)
                elif not stopping.done():
                    await self._stir()
                elif not await self._last_look():
                    return
        finally:
            stopping.cancel()

    async def _stir(self) -> None:
        """Wait until something may have arrived.

        The descriptor is watched only meanwhile: it stays readable while nobody reads.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            loop.remove_reader(self._descriptor)

    async def _last_look(self) -> bool:
        """Whether more arrives that was on its way up from the I/O thread."""
        try:
            async with asyncio.timeout(_LAST_LOOK_S):
                while not self._has_mail():
                    self._stirred.clear()
                    await self._stir()
        except TimeoutError:
            return False
        return True

    def _has_mail(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive_now(self) -> Frames | None:
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None


def monitor_event(frames: Frames) -> tuple[zmq.Event, str]:
    """A monitor's message: what happened, and at which endpoint."""
    message = parse_monitor_message(frames)
    return zmq.Event(message["event"]), message["endpoint"].decode(errors="replace")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
