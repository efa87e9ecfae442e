"""Serve a worker's port over ZeroMQ: ROUTER for commands and answers, PUB for events."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from halfmoon_protocol.codec import decode, encode
from halfmoon_protocol.errors import MessageTooLarge, ProtocolError, UnknownVersion
from halfmoon_protocol.kv_events import KvEvent, encode_payload, encode_sequence
from halfmoon_protocol.messages import AnyMessage, Message
from halfmoon_protocol.versions import wrong_version
from halfmoon_runtime.channels.backpressure import SendBackpressure
from halfmoon_runtime.channels.dropped_messages import drop_reason, record_drop
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable
from halfmoon_runtime.channels.receive_queue import ReceiveQueue
from halfmoon_runtime.channels.socket_pump import Frames, SocketPump
from halfmoon_runtime.channels.unread_shares import UnreadShares
from halfmoon_runtime.channels.zmq_curve import Curve
from halfmoon_runtime.channels.zmq_sockets import (
    HANDSHAKE_FAILED,
    SocketSettings,
    bind_to_free_port,
    close_sockets,
    configure,
    monitor_event,
)

#: Callers that may all have as much unread as one may have.
_FULL_SHARES = 4
#: First frame of published messages that are no KV events.
LOAD_TOPIC = b"load"
#: Seconds between two answers to a caller's frames of other versions.
_VERSION_PAUSE_S = 1.0
#: Callers with such frames that are remembered.
_MAX_VERSIONS_TOLD = 1024


class ZmqPort:
    """A `Port`, which reads its ROUTER and the monitors of both sockets until it is closed."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        host: str,
        advertise_host: str,
        settings: SocketSettings,
        curve: Curve | None,
        on_closed: Callable[["ZmqPort"], None],
    ) -> None:
        """Bind both sockets to free ports, and take messages from now on.

        Args:
            context: makes the sockets.
            name: name of the worker.
            host: address to bind to.
            advertise_host: name or address that callers dial.
            settings: bounds of the sockets.
            curve: encrypts the sockets; None: they are not.
            on_closed: called once, when the port is closed.

        Raises:
            OSError: `host` is no address of this machine, or no port is free.
        """
        self._name = name
        self._settings = settings
        self._on_closed = on_closed
        self._key_id = "" if curve is None else curve.key_id
        self._turns = SendBackpressure()
        self._kv_sequence = 0
        #: When callers were last told that their version is not spoken here.
        self._versions_told: dict[PeerId, float] = {}
        self._router = context.socket(zmq.ROUTER)
        # Make a send to a caller that is gone an error; the default drops it silently.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._pub = context.socket(zmq.PUB)
        self._commands_pump, self._events_pump = SocketPump(self._router), SocketPump(self._pub)
        most_messages, most_bytes = settings.unread_messages, settings.unread_bytes
        self._unread = UnreadShares(most_messages, most_bytes)
        #: Caller, message, and bytes of its frame.
        self._inbox: ReceiveQueue[tuple[PeerId, AnyMessage, int]] = ReceiveQueue(
            _FULL_SHARES * most_messages, _FULL_SHARES * most_bytes
        )
        sockets = (self._router, self._pub)
        monitors = [socket.get_monitor_socket(HANDSHAKE_FAILED) for socket in sockets]
        self._monitor_pumps = [SocketPump(monitor) for monitor in monitors]
        try:
            for socket in sockets:
                configure(socket, settings)
                if curve is not None:
                    curve.serve(socket)
            self._commands = bind_to_free_port(self._router, host, advertise_host)
            self._events = bind_to_free_port(self._pub, host, advertise_host)
        except BaseException:
            self._close_sockets()
            raise
        self._commands_pump.start(self._take, on_failure=self._close)
        for pump in self._monitor_pumps:
            pump.start(self._on_bad_handshake, on_failure=self._close)

    @property
    def commands(self) -> str:
        """See `Port.commands`."""
        return self._commands

    @property
    def events(self) -> str:
        """See `Port.events`."""
        return self._events

    @property
    def key_id(self) -> str:
        """See `Port.key_id`."""
        return self._key_id

    async def receive(self) -> tuple[PeerId, AnyMessage]:
        """See `Port.receive`.

        Raises:
            PeerUnreachable: the port is closed and all earlier messages are received.
        """
        peer, message, n_bytes = await self._inbox.get()
        self._unread.remove(peer, n_bytes)
        return peer, message

    async def send(self, peer: PeerId, message: Message) -> None:
        """See `Port.send`."""
        frame = encode(message)
        await self._turns.send(peer, lambda: self._offer(peer, frame))

    async def publish(self, message: Message) -> None:
        """See `Port.publish`."""
        frame = encode(message)
        self._require_open()
        self._events_pump.send_now(LOAD_TOPIC, frame)

    async def publish_kv(self, events: Sequence[KvEvent]) -> int:
        """See `Port.publish_kv`.

        Raises:
            MessageTooLarge: listeners would drop the message; publish fewer events at a time.
        """
        payload, limit = encode_payload(events, time.time()), self._settings.max_message_bytes
        if len(payload) > limit:
            raise MessageTooLarge(f"KV events of {len(payload)} bytes are over {limit}")
        self._require_open()
        sequence = self._kv_sequence
        self._kv_sequence += 1
        topic = b"kv@" + self._name.encode()
        self._events_pump.send_now(topic, encode_sequence(sequence), payload)
        return sequence

    async def close(self) -> None:
        """See `Port.close`."""
        self._close()

    def _offer(self, peer: PeerId, frame: bytes) -> bool:
        self._require_open()
        try:
            self._commands_pump.send_now(peer, frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerUnreachable(f"{self._name}: caller {peer.hex()} is gone") from None
        return True

    def _require_open(self) -> None:
        if self._router.closed:
            raise PeerUnreachable(f"{self._name}: the port is closed")

    def _take(self, frames: Frames) -> None:
        if len(frames) != 2:
            record_drop("frames", self._commands, f"{len(frames) - 1} frames, a command has 1")
            return
        peer, frame = PeerId(frames[0]), frames[1]
        if not self._unread.fits(peer, len(frame)):
            record_drop("flooded", self._commands, f"caller {peer.hex()} sends more than is read")
            return
        try:
            message = decode(frame, max_bytes=self._settings.max_message_bytes)
        except ProtocolError as error:
            record_drop(drop_reason(error), self._commands, error)
            if isinstance(error, UnknownVersion):
                self._answer_version(peer, error.got)
        else:
            if self._inbox.try_put((peer, message, len(frame)), len(frame)):
                self._unread.add(peer, len(frame))
            else:
                record_drop("flooded", self._commands, "its callers send more than is read")

    def _answer_version(self, peer: PeerId, got: int) -> None:
        """Tell a caller, about once a second, that its frames can't be read."""
        now = time.monotonic()
        if now < self._versions_told.get(peer, 0.0) + _VERSION_PAUSE_S:
            return
        if len(self._versions_told) >= _MAX_VERSIONS_TOLD:
            self._versions_told.clear()
        self._versions_told[peer] = now
        with suppress(PeerUnreachable):
            self._offer(peer, encode(wrong_version(got)))

    def _on_bad_handshake(self, frames: Frames) -> None:
        event, endpoint = monitor_event(frames)
        record_drop("handshake", endpoint, event.name)

    def _close(self) -> None:
        if not self._router.closed:
            self._inbox.close(f"{self._name}: the port is closed")
            self._close_sockets()
            self._on_closed(self)

    def _close_sockets(self) -> None:
        pumps = [self._commands_pump, self._events_pump, *self._monitor_pumps]
        for pump in pumps:
            pump.stop()
        close_sockets(*(pump.socket for pump in pumps))
