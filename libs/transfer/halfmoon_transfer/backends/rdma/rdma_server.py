"""Answer requests on accepted side channels: the owner's side of RDMA.

The thread of a side channel makes the owner's ends of rails, and frees them when the channel
closes. It grants regions to peers that know their keys. The NICs move the bytes without it.
"""

import contextlib
import logging
import select
import socket

from halfmoon_transfer.backends.rdma import rail_notifications, rdma_handshake
from halfmoon_transfer.backends.rdma.owner_rail import OwnerRail
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    ConnectRail,
    FenceRail,
    HandshakeError,
    InitiatorProof,
    NotificationResult,
    OwnerProof,
    RailFenced,
    RdmaFailure,
    RdmaHello,
    RdmaRegionDenial,
    RdmaRegionRequest,
    RdmaReply,
    RdmaWelcome,
)
from halfmoon_transfer.backends.rdma.rdma_memory import RdmaMemoryTable
from halfmoon_transfer.backends.rdma.verbs import VerbsError
from halfmoon_transfer.backends.socket_io import SocketClosed, send_all
from halfmoon_transfer.backends.socket_listener import SocketListener
from halfmoon_transfer.cluster_key import ClusterKey, ProverRole, key_mismatch_hint, make_nonce
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)


class RdmaServer:
    """Serves one segment's regions to links."""

    def __init__(
        self,
        regions: RegionTable,
        memory: RdmaMemoryTable,
        devices: dict[str, RdmaDevice],
        notification_queue: NotificationQueue,
        *,
        bind: str,
        port: int,
        label: str,
        max_connections: int,
        stall_timeout_s: float,
        key: ClusterKey | None,
    ) -> None:
        self._regions = regions
        self._memory = memory
        self._devices = devices
        self._key = key
        self._notification_queue = notification_queue
        self._listener = SocketListener(
            self._serve,
            malformed=HandshakeError,
            farewell=self._farewell,
            bind=bind,
            port=port,
            label=label,
            max_connections=max_connections,
            stall_timeout_s=stall_timeout_s,
        )
        self.port = self._listener.port
        self._listener.start()

    @property
    def n_connections(self) -> int:
        """Links open now."""
        return self._listener.n_connections

    @property
    def n_malformed(self) -> int:
        """Links closed because of malformed messages."""
        return self._listener.n_malformed

    def close(self) -> None:
        """Stop listening and close all links."""
        self._listener.close()

    def _farewell(self, reason: str) -> bytes:
        welcome = RdmaWelcome(self._regions.segment, self._regions.generation, refused=reason)
        return rdma_handshake.encode(welcome)

    def _serve(self, sock: socket.socket) -> None:
        link = _OwnerLink(
            sock, self._regions, self._memory, self._devices, self._notification_queue, self._key
        )
        try:
            link.serve()
        finally:
            link.close()


class _OwnerLink:
    """One accepted side channel and its ends of rails."""

    def __init__(
        self,
        sock: socket.socket,
        regions: RegionTable,
        memory: RdmaMemoryTable,
        devices: dict[str, RdmaDevice],
        notification_queue: NotificationQueue,
        key: ClusterKey | None,
    ) -> None:
        self._socket = sock
        self._key = key
        self._regions = regions
        self._memory = memory
        self._devices = devices
        self._notification_queue = notification_queue
        #: By the initiator's number.
        self._ends: dict[int, OwnerRail] = {}

    def serve(self) -> None:
        """Answer until the peer hangs up.

        Raises:
            HandshakeError: the peer sent something else.
            OSError: the connection broke, or stalled in the middle of a message.
        """
        hello = self._next()
        if hello is None:
            return
        if not isinstance(hello, RdmaHello):
            raise HandshakeError("the first message is no RdmaHello")
        welcome = self._welcome(hello)
        send_all(self._socket, [rdma_handshake.encode(welcome)])
        if welcome.refused or (
            self._key is not None and not self._trust(self._key, hello, welcome)
        ):
            return
        while (request := self._next()) is not None:
            # Notifications that arrived before a fence are answered before it.
            self._take_notifications()
            send_all(self._socket, [rdma_handshake.encode(self._answer(request))])

    def _trust(self, key: ClusterKey, hello: RdmaHello, welcome: RdmaWelcome) -> bool:
        """Check the peer's proof, and answer with our own if it is right."""
        theirs = self._next()
        if not isinstance(theirs, InitiatorProof):
            raise HandshakeError("no proof after a RdmaHello")
        transcripts = (
            rdma_handshake.proof_transcript(hello),
            rdma_handshake.proof_transcript(welcome),
        )
        proven = key.find_proven(theirs.proof, ProverRole.INITIATOR, *transcripts)
        if proven is not None:
            verdict = OwnerProof(proven.prove(ProverRole.OWNER, *transcripts))
        else:
            _log.warning("a link is refused: the peer has another cluster key")
            verdict = OwnerProof(refused="another cluster key is set there than here")
        send_all(self._socket, [rdma_handshake.encode(verdict)])
        return proven is not None

    def close(self) -> None:
        """Free all ends: peers reach our memory through them no more."""
        for end in self._ends.values():
            try:
                end.close()
            except VerbsError as error:
                _log.error("a queue pair stays: %s", error)
        self._ends.clear()

    def _next(self) -> rdma_handshake.RdmaRequest | None:
        while True:
            self._wait()
            try:
                # A peer may idle between requests without limit.
                if not self._socket.recv(1, socket.MSG_PEEK):
                    return None
            except BlockingIOError:
                continue
            try:
                return rdma_handshake.decode_request(rdma_handshake.receive_body(self._socket))
            except SocketClosed as closed:
                raise HandshakeError("the peer hung up in the middle of a message") from closed

    def _wait(self) -> None:
        """Wait for a message on the side channel, and take notifications meanwhile."""
        ends = {end.fd: end for end in self._ends.values()}
        poll = select.poll()
        for fd in (*ends, self._socket.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            # Completions before arming are not announced: poll again first.
            while any(end.arm() for end in ends.values()):
                self._take_notifications()
            ready = {fd for fd, _ in poll.poll()}
            for fd in ready & ends.keys():
                ends[fd].take_event()
            if self._socket.fileno() in ready:
                return

    def _take_notifications(self) -> None:
        """Queue the notifications that have arrived, and acknowledge them."""
        for end in self._ends.values():
            for body in end.arrived():
                generation, notification = rail_notifications.decode(body)
                result = NotificationResult(notification.id, AccessStatus.OK)
                try:
                    self._notification_queue.deliver(generation, notification)
                except AccessRefused as refused:
                    result = NotificationResult(notification.id, refused.status, refused.detail)
                send_all(self._socket, [rdma_handshake.encode(result)])

    def _welcome(self, hello: RdmaHello) -> RdmaWelcome:
        own = self._regions
        refused = ""
        if hello.version != rdma_handshake.VERSION:
            refused = f"handshake version {hello.version}; this is version {rdma_handshake.VERSION}"
        elif (hello.segment, hello.generation) != (own.segment, own.generation):
            refused = (
                f"this is segment {own.segment}, generation {own.generation}, "
                f"not {hello.segment:.200}, generation {hello.generation}"
            )
        elif self._key is not None and not hello.nonce:
            _log.warning("a link is refused: the peer has no cluster key")
            refused = key_mismatch_hint("there", "here")
        gids: dict[str, str] = {}
        for name, device in self._devices.items():
            with contextlib.suppress(VerbsError):  # it has no address just now
                gids[name] = device.gid().text
        ours = b"" if self._key is None else make_nonce()
        return RdmaWelcome(own.segment, own.generation, {} if refused else gids, refused, ours)

    def _answer(self, request: rdma_handshake.RdmaRequest) -> RdmaReply:
        try:
            match request:
                case RdmaHello() | InitiatorProof():
                    raise HandshakeError(f"a second {type(request).__name__}")
                case ConnectRail():
                    return self._connect(request)
                case FenceRail(rail=rail):
                    if rail in self._ends:
                        self._ends[rail].fence()
                    return RailFenced()
                case RdmaRegionRequest(generation=generation, key=key):
                    return self._memory.lend(generation, key)
        except AccessRefused as refused:
            return RdmaRegionDenial(refused.status, refused.detail)
        except VerbsError as error:
            return RdmaFailure(str(error)[:1000])

    def _connect(self, request: ConnectRail) -> RdmaReply:
        device = self._devices.get(request.device)
        if device is None:
            return RdmaFailure(f"there is no device {request.device}")
        end = self._ends.get(request.rail)
        if end is None:
            end = self._ends[request.rail] = OwnerRail(device)
        if end.device is not device:
            return RdmaFailure(f"rail {request.rail} is on device {end.device.name}")
        return end.connect(request.end)
