"""Connect a caller to a worker over ZeroMQ: DEALER for commands and answers, SUB for events.

    connecting ──all handshakes done──► up ──a connection is lost──► down
        └────────────connect timeout, or closed──────────────────────►┘

A link is up once and never reconnects: its owner must not mistake a restarted worker for the
earlier one. To reach the restarted worker, dial again. Messages received before the link went
down are still delivered, then `receive` raises.
"""

import asyncio

import structlog
import zmq

from halfmoon_protocol.codec import decode, encode
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.kv_events import KvEventBatch, decode_payload, decode_sequence
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.dropped_messages import drop_reason, record_drop
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_runtime.channels.receive_queue import ReceiveQueue
from halfmoon_runtime.channels.zmq_sockets import (
    HANDSHAKE_FAILED,
    Frames,
    SocketSettings,
    ZmqSocket,
    close_sockets,
    configure,
    monitor_event,
)

_SCHEMES = ("tcp://", "ipc://")
_WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | HANDSHAKE_FAILED
)

_log = structlog.get_logger(__name__)


class ZmqLink:
    """A `WorkerLink`. Its task reads the sockets and their monitors, and closes them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        commands: str,
        events: str | None,
        settings: SocketSettings,
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._inbox: ReceiveQueue[AnyMessage | KvEventBatch] = ReceiveQueue(settings.inbox_messages)
        self._dealer = _LinkSocket(self, context.socket(zmq.DEALER), commands, settings)
        self._sockets = [self._dealer]
        if events is not None:
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            self._sockets.append(_LinkSocket(self, sub, events, settings))
        #: Set once the link is up, or down.
        self._resolved = asyncio.Event()
        #: Set once the link is down, after `_reason`; stops the readers.
        self._down = asyncio.Event()
        self._reason = ""
        self.task = asyncio.create_task(self._run(), name=f"link {commands}")

    async def connect(self) -> None:
        """Wait until the link is up, or down."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await self._resolved.wait()
        except TimeoutError:
            missing = ", ".join(
                str(link_socket) for link_socket in self._sockets if not link_socket.is_up
            )
            self.break_off(f"not connected in {self._settings.connect_timeout_s} s: {missing}")
        except BaseException:
            await self.close()
            raise

    @property
    def is_down(self) -> bool:
        """True once the link is down, for good."""
        return self._down.is_set()

    async def send(self, message: Message) -> None:
        """See `WorkerLink.send`."""
        frame = encode(message)
        if self.is_down:
            raise PeerUnreachable(self._reason)
        try:
            self._dealer.reader.send_now([frame])
        except zmq.Again:
            limit = self._settings.send_queue_messages
            raise PeerUnreachable(
                f"{self._commands}: its queue is full, with {limit} messages"
            ) from None

    async def receive(self) -> AnyMessage | KvEventBatch:
        """See `WorkerLink.receive`."""
        return await self._inbox.get()

    async def close(self) -> None:
        """See `WorkerLink.close`."""
        self.break_off(f"{self._commands}: we hung up")
        self.task.cancel()
        await asyncio.wait({self.task})
        self._close()

    def on_socket_up(self) -> None:
        """Mark the link as up when the handshakes of all its sockets are done."""
        if all(link_socket.is_up for link_socket in self._sockets):
            self._resolved.set()

    def break_off(self, reason: str) -> None:
        """Take the link down for good; the first reason stays."""
        if not self.is_down:
            self._reason = reason
            self._down.set()
            self._resolved.set()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for link_socket in self._sockets:
                    link_socket.open()
                    take = (
                        self._take_answer if link_socket is self._dealer else self._take_published
                    )
                    tasks.create_task(
                        ZmqSocket(link_socket.monitor).read_until(link_socket.on_event, self._down)
                    )
                    tasks.create_task(link_socket.reader.read_until(take, self._down))
        except ExceptionGroup:
            _log.exception("link failed", endpoint=self._commands)
        finally:
            self._close()

    async def _take_answer(self, frames: Frames) -> None:
        if len(frames) != 1:
            record_drop("frames", self._commands, f"{len(frames)} frames, an answer has 1")
            return
        await self._decode(frames[0])

    async def _take_published(self, frames: Frames) -> None:
        where = self._sockets[-1].endpoint
        if len(frames) == 2:
            await self._decode(frames[1])
        elif len(frames) == 3:
            try:
                batch = decode_payload(frames[2], decode_sequence(frames[1]))
            except (ProtocolError, RecursionError) as error:
                record_drop("malformed", where, error)
            else:
                await self._inbox.put(batch)
        else:
            record_drop("frames", where, f"{len(frames)} frames, a publication has 2 or 3")

    async def _decode(self, frame: bytes) -> None:
        try:
            message = decode(frame, max_bytes=self._settings.max_message_bytes)
        except ProtocolError as error:
            record_drop(drop_reason(error), self._commands, error)
        else:
            await self._inbox.put(message)

    def _close(self) -> None:
        self.break_off(f"{self._commands}: the link failed, see the log")
        self._inbox.close(self._reason)
        for link_socket in self._sockets:
            close_sockets(link_socket.socket, link_socket.monitor)


class _LinkSocket:
    """Follow one of a link's two sockets by its monitor."""

    def __init__(
        self,
        link: ZmqLink,
        socket: "zmq.Socket[bytes]",
        endpoint: str,
        settings: SocketSettings,
    ) -> None:
        self.socket, self.reader = socket, ZmqSocket(socket)
        self.monitor = socket.get_monitor_socket(_WATCHED)
        self.endpoint = endpoint
        #: Whether the handshake is done; stays true after the connection is lost.
        self.is_up = False
        self._link = link
        self._settings = settings
        #: Failure of the last attempt to connect.
        self._last_failure = "no answer"

    def __str__(self) -> str:
        return f"{self.endpoint} ({self._last_failure})"

    def open(self) -> None:
        """Start to connect."""
        configure(self.socket, self._settings)
        if self.endpoint.startswith(_SCHEMES):
            self._connect()
        else:
            self._link.break_off(f"{self.endpoint}: not an endpoint of {' or '.join(_SCHEMES)}")

    async def on_event(self, frames: Frames) -> None:
        """Retry until the connection is up; take the link down when it is lost."""
        event, _ = monitor_event(frames)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.is_up = True
            self._link.on_socket_up()
        elif event == zmq.Event.DISCONNECTED:
            if self.is_up:
                self._link.break_off(f"{self.endpoint}: the connection is lost")
        elif event & HANDSHAKE_FAILED:
            self._last_failure = "the handshake failed"
            record_drop("handshake", self.endpoint, event.name)
        elif not self.is_up and not self._link.is_down:
            # Nothing was sent yet, so disconnecting in order to retry loses nothing.
            await asyncio.sleep(self._settings.connect_retry_s)
            self.socket.disconnect(self.endpoint)
            self._connect()

    def _connect(self) -> None:
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._link.break_off(f"{self.endpoint}: {error.strerror}")
