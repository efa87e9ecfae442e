"""Connect a caller to a worker over ZeroMQ: DEALER for commands and answers, SUB for events.

    connecting ──all handshakes done──► up ──a connection is lost──► down
        └────────────connect timeout, or closed──────────────────────►┘

A link is up once and never reconnects: its owner must not mistake a restarted worker for the
earlier one. To reach the restarted worker, dial again. Messages received before the link went
down are still delivered, then `receive` raises.
"""

import asyncio
from collections.abc import Callable

import structlog
import zmq

from halfmoon_protocol.codec import decode, encode
from halfmoon_protocol.errors import ProtocolError
from halfmoon_protocol.kv_events import KvEventBatch, decode_payload, decode_sequence
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_runtime.channels.dropped_messages import drop_reason, record_drop
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_runtime.channels.receive_queue import ReceiveQueue
from halfmoon_runtime.channels.socket_pump import Frames, SocketPump
from halfmoon_runtime.channels.tcp_reach import tcp_fault
from halfmoon_runtime.channels.zmq_curve import Curve
from halfmoon_runtime.channels.zmq_sockets import (
    HANDSHAKE_FAILED,
    SocketSettings,
    close_sockets,
    configure,
    monitor_event,
)

#: Descriptors of a link: its two sockets and their monitors' two each have one, and so does each
#: of the two connections.
LINK_DESCRIPTORS = 8
_SCHEMES = ("tcp://", "ipc://")
#: Seconds of one more attempt by plain TCP, which tells why the others came to nothing.
_REACH_S = 1.0
_WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | HANDSHAKE_FAILED
)

_log = structlog.get_logger(__name__)


class ZmqLink:
    """A `WorkerLink`. Its task waits for the end of the connection, and closes the sockets."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        commands: str,
        events: str | None,
        settings: SocketSettings,
        curve: Curve | None,
        key_id: str,
    ) -> None:
        self._settings = settings
        self.curve, self.key_id = curve, key_id
        self._commands = commands
        self._inbox: ReceiveQueue[AnyMessage | KvEventBatch] = ReceiveQueue(
            settings.unread_messages, settings.unread_bytes
        )
        #: Whether the worker has sent more than is read.
        self._is_flooded = False
        #: Set once the link is up, or down.
        self._resolved = asyncio.Event()
        #: Set once the link is down, after `_reason`.
        self._down = asyncio.Event()
        self._reason = ""
        self._sockets: list[_LinkSocket] = []
        try:
            self._dealer = _LinkSocket(self, context, zmq.DEALER, commands, settings)
            self._sockets.append(self._dealer)
            if events is not None:
                sub = _LinkSocket(self, context, zmq.SUB, events, settings)
                self._sockets.append(sub)
                sub.socket.setsockopt(zmq.SUBSCRIBE, b"")
        except zmq.ZMQError as error:
            self.break_off(f"{commands}: this process opens no more sockets: {error.strerror}")
        self.task = asyncio.create_task(self._run(), name=f"link {commands}")

    async def connect(self) -> None:
        """Wait until the link is up, or down."""
        limit_s = self._settings.connect_timeout_s
        try:
            try:
                async with asyncio.timeout(limit_s):
                    await self._resolved.wait()
            except TimeoutError:
                missing = [each for each in self._sockets if not each.is_up]
                faults = [f"{each.endpoint} ({await each.explain_failure()})" for each in missing]
                self.break_off(f"not connected in {limit_s} s: {', '.join(faults)}")
        except BaseException:
            await self.close()
            raise

    @property
    def is_down(self) -> bool:
        """True once the link is down, for good."""
        return self._down.is_set()

    async def send(self, message: Message) -> None:
        """See `WorkerLink.send`."""
        self.send_now(message)

    def send_now(self, message: Message) -> None:
        """See `WorkerLink.send_now`."""
        frame = encode(message)
        if self.is_down:
            raise PeerUnreachable(self._reason)
        try:
            self._dealer.pump.send_now(frame)
        except zmq.Again:
            limit = self._settings.command_queue_messages
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
        """See `WorkerLink.break_off`."""
        if not self.is_down:
            self._reason = reason
            self._down.set()
            self._resolved.set()

    async def _run(self) -> None:
        try:
            for link_socket in self._sockets:
                is_dealer = link_socket is self._dealer
                take = self._take_answer if is_dealer else self._take_published
                link_socket.open(take, self._on_failure)
            await self._down.wait()
            if not self._is_flooded:  # it would send on
                for link_socket in self._sockets:
                    await link_socket.pump.settle()
        except Exception:
            _log.exception("link failed", endpoint=self._commands)
        finally:
            self._close()

    def _on_failure(self) -> None:
        self.break_off(f"{self._commands}: the link failed, see the log")

    def _take_answer(self, frames: Frames) -> None:
        if len(frames) == 1:
            if not self._decode(frames[0]) and not self.is_down:
                self._is_flooded = True
                n = len(self._inbox)
                self.break_off(f"{self._commands}: it sends more than is read, {n} messages wait")
        else:
            record_drop("frames", self._commands, f"{len(frames)} frames, an answer has 1")

    def _take_published(self, frames: Frames) -> None:
        where = self._sockets[-1].endpoint
        if len(frames) == 2:
            self._decode(frames[1])
        elif len(frames) == 3:
            try:
                batch = decode_payload(frames[2], decode_sequence(frames[1]))
            except (ProtocolError, RecursionError) as error:
                record_drop("malformed", where, error)
            else:
                self._note(batch, frames[2])
        else:
            record_drop("frames", where, f"{len(frames)} frames, a publication has 2 or 3")

    def _decode(self, frame: bytes) -> bool:
        """Queue a message that can be read; return False if there is no room for it."""
        try:
            message = decode(frame, max_bytes=self._settings.max_message_bytes)
        except ProtocolError as error:
            record_drop(drop_reason(error), self._commands, error)
            return True
        return self._note(message, frame)

    def _note(self, message: AnyMessage | KvEventBatch, frame: bytes) -> bool:
        if self._inbox.try_put(message, len(frame)):
            return True
        record_drop("flooded", self._commands, f"no room for a {type(message).__name__}")
        return False

    def _close(self) -> None:
        self._on_failure()  # keeps an earlier reason
        self._inbox.close(self._reason)
        for link_socket in self._sockets:
            link_socket.close()


class _LinkSocket:
    """Follow one of a link's two sockets by its monitor."""

    def __init__(
        self,
        link: ZmqLink,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kind: int,
        endpoint: str,
        settings: SocketSettings,
    ) -> None:
        """Open the socket and its monitor, or neither.

        Raises:
            zmq.ZMQError: the process has too many sockets or descriptors.
        """
        self.socket = context.socket(kind)
        try:
            self.pump = SocketPump(self.socket)
            self._monitor_pump = SocketPump(self.socket.get_monitor_socket(_WATCHED))
        except BaseException:
            close_sockets(self.socket)
            raise
        self.endpoint = endpoint
        #: Whether the handshake is done; stays true after the connection is lost.
        self.is_up = False
        self._link = link
        self._settings = settings
        #: Failure of the last handshake; empty: none failed.
        self._failure = ""
        #: The next attempt to connect.
        self._retry: asyncio.TimerHandle | None = None

    async def explain_failure(self) -> str:
        """Return why the connection did not come up, after the last attempt."""
        if self._failure:
            return self._failure
        if fault := await tcp_fault(self.endpoint, _REACH_S):
            return fault
        return (
            "it takes connections, and ends no handshake: it has another cluster key, is no worker,"
            " or hangs"
        )

    def open(
        self,
        take: Callable[[Frames], None],
        on_failure: Callable[[], None],
    ) -> None:
        """Start to connect, and to hand over messages."""
        configure(self.socket, self._settings)
        self.socket.setsockopt(zmq.SNDHWM, self._settings.command_queue_messages)
        self._monitor_pump.start(self._on_event, on_failure=on_failure)
        self.pump.start(take, on_failure=on_failure)
        if self._link.is_down:
            return  # the port can't be called with our keys
        if self._link.curve is not None:
            self._link.curve.call(self.socket, self._link.key_id)
        if self.endpoint.startswith(_SCHEMES):
            self._connect()
        else:
            self._link.break_off(f"{self.endpoint}: not an endpoint of {' or '.join(_SCHEMES)}")

    def close(self) -> None:
        """Close the socket and its monitor; closing twice does no harm."""
        if self._retry is not None:
            self._retry.cancel()
        self.pump.stop()
        self._monitor_pump.stop()
        close_sockets(self.socket, self._monitor_pump.socket)

    def _on_event(self, frames: Frames) -> None:
        """Retry until the connection is up; take the link down when it is lost."""
        event, _ = monitor_event(frames)
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.is_up = True
            self._link.on_socket_up()
        elif event == zmq.Event.DISCONNECTED:
            if self.is_up:
                self._link.break_off(f"{self.endpoint}: the connection is lost")
        elif event & HANDSHAKE_FAILED:
            self._failure = "the handshake failed: another cluster key, or no worker"
            record_drop("handshake", self.endpoint, event.name)
        elif not self.is_up and not self._link.is_down and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._settings.connect_retry_s, self._connect_again)

    def _connect_again(self) -> None:
        """Connect anew. Nothing was sent yet, so nothing is lost by disconnecting."""
        self._retry = None
        if not self.is_up and not self._link.is_down:
            self.socket.disconnect(self.endpoint)
            self._connect()

    def _connect(self) -> None:
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._link.break_off(f"{self.endpoint}: {error.strerror}")
