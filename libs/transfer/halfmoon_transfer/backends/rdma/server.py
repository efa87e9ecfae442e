"""The owner's side: what is said on each side channel.

The thread that serves it makes the owner's ends of rails, lends regions to whoever knows their
keys, and frees all ends when the channel closes. The bytes themselves pass by it.
"""

import contextlib
import logging
import select
import socket

from halfmoon_transfer.backends.listening import Listener
from halfmoon_transfer.backends.rdma import handshake, notices
from halfmoon_transfer.backends.rdma.device import Device
from halfmoon_transfer.backends.rdma.handshake import (
    Ask,
    Connect,
    Denied,
    Failed,
    Fence,
    Fenced,
    HandshakeError,
    Hello,
    Noted,
    Prove,
    Proven,
    Reply,
    Welcome,
)
from halfmoon_transfer.backends.rdma.memory import MemoryTable
from halfmoon_transfer.backends.rdma.owner_end import OwnerEnd
from halfmoon_transfer.backends.rdma.verbs import VerbsError
from halfmoon_transfer.backends.tcp.sockets import Closed, send_all
from halfmoon_transfer.cluster_key import ClusterKey, Role, nonce, set_it_on_both_sides
from halfmoon_transfer.notifications import Inbox
from halfmoon_transfer.regions import Refused, RegionTable, Status

_log = logging.getLogger(__name__)


class RdmaServer:
    """Serves one segment's regions to links."""

    def __init__(
        self,
        regions: RegionTable,
        memory: MemoryTable,
        devices: dict[str, Device],
        inbox: Inbox,
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
        self._inbox = inbox
        self._listener = Listener(
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
        """Links ended for what was said on them."""
        return self._listener.n_malformed

    def close(self) -> None:
        """Stop listening and hang up on everybody."""
        self._listener.close()

    def _farewell(self, reason: str) -> bytes:
        welcome = Welcome(self._regions.segment, self._regions.generation, refused=reason)
        return handshake.encode(welcome)

    def _serve(self, sock: socket.socket) -> None:
        link = _OwnerLink(sock, self._regions, self._memory, self._devices, self._inbox, self._key)
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
        memory: MemoryTable,
        devices: dict[str, Device],
        inbox: Inbox,
        key: ClusterKey | None,
    ) -> None:
        self._socket = sock
        self._key = key
        self._regions = regions
        self._memory = memory
        self._devices = devices
        self._inbox = inbox
        #: By the initiator's number.
        self._ends: dict[int, OwnerEnd] = {}

    def serve(self) -> None:
        """Answer until the peer hangs up.

        Raises:
            HandshakeError: the peer sent something else.
            OSError: the connection broke, or stalled in the middle of a message.
        """
        hello = self._next()
        if hello is None:
            return
        if not isinstance(hello, Hello):
            raise HandshakeError("the first message is no Hello")
        welcome = self._welcome(hello)
        send_all(self._socket, [handshake.encode(welcome)])
        if welcome.refused or (
            self._key is not None and not self._trust(self._key, hello, welcome)
        ):
            return
        while (request := self._next()) is not None:
            # A fence is answered after what had arrived before it.
            self._take_notices()
            send_all(self._socket, [handshake.encode(self._answer(request))])

    def _trust(self, key: ClusterKey, hello: Hello, welcome: Welcome) -> bool:
        """Hear the peer's proof, and answer with our own if it deserves one."""
        theirs = self._next()
        if not isinstance(theirs, Prove):
            raise HandshakeError("no proof after a Hello")
        said = handshake.words(hello), handshake.words(welcome)
        trusted = key.accepts(theirs.proof, Role.INITIATOR, *said)
        if trusted:
            verdict = Proven(key.prove(Role.OWNER, *said))
        else:
            _log.warning("a link is refused: the peer has another cluster key")
            verdict = Proven(refused="another cluster key is set there than here")
        send_all(self._socket, [handshake.encode(verdict)])
        return trusted

    def close(self) -> None:
        """Free all ends: nobody reaches our memory through them any more."""
        for end in self._ends.values():
            try:
                end.close()
            except VerbsError as error:
                _log.error("a queue pair stays: %s", error)
        self._ends.clear()

    def _next(self) -> handshake.Request | None:
        while True:
            self._wait()
            try:
                # Idling between requests is fine, for as long as the peer likes.
                if not self._socket.recv(1, socket.MSG_PEEK):
                    return None
            except BlockingIOError:
                continue
            try:
                return handshake.decode_request(handshake.receive_body(self._socket))
            except Closed as closed:
                raise HandshakeError("the peer hung up in the middle of a message") from closed

    def _wait(self) -> None:
        """Until something is said on the side channel; meanwhile, notices are taken."""
        ends = {end.fd: end for end in self._ends.values()}
        poll = select.poll()
        for fd in (*ends, self._socket.fileno()):
            poll.register(fd, select.POLLIN)
        while True:
            # What completed before a queue was armed is not announced: look again first.
            while any(end.arm() for end in ends.values()):
                self._take_notices()
            ready = {fd for fd, _ in poll.poll()}
            for fd in ready & ends.keys():
                ends[fd].take_event()
            if self._socket.fileno() in ready:
                return

    def _take_notices(self) -> None:
        """Put what has arrived into the inbox and say so."""
        for end in self._ends.values():
            for body in end.arrived():
                generation, notice = notices.decode(body)
                noted = Noted(notice.id, Status.OK)
                try:
                    self._inbox.deliver(generation, notice)
                except Refused as refused:
                    noted = Noted(notice.id, refused.status, refused.detail)
                send_all(self._socket, [handshake.encode(noted)])

    def _welcome(self, hello: Hello) -> Welcome:
        own = self._regions
        refused = ""
        if hello.version != handshake.VERSION:
            refused = f"handshake version {hello.version}; this is version {handshake.VERSION}"
        elif (hello.segment, hello.generation) != (own.segment, own.generation):
            refused = (
                f"this is segment {own.segment}, generation {own.generation}, "
                f"not {hello.segment:.200}, generation {hello.generation}"
            )
        elif self._key is not None and not hello.nonce:
            _log.warning("a link is refused: the peer has no cluster key")
            refused = set_it_on_both_sides("there", "here")
        gids: dict[str, str] = {}
        for name, device in self._devices.items():
            with contextlib.suppress(VerbsError):  # it has no address just now
                gids[name] = device.gid().text
        ours = b"" if self._key is None else nonce()
        return Welcome(own.segment, own.generation, {} if refused else gids, refused, ours)

    def _answer(self, request: handshake.Request) -> Reply:
        try:
            match request:
                case Hello() | Prove():
                    raise HandshakeError(f"a second {type(request).__name__}")
                case Connect():
                    return self._connect(request)
                case Fence(rail=rail):
                    if rail in self._ends:
                        self._ends[rail].fence()
                    return Fenced()
                case Ask(generation=generation, key=key):
                    return self._memory.lend(generation, key)
        except Refused as refused:
            return Denied(refused.status, refused.detail)
        except VerbsError as error:
            return Failed(str(error)[:1000])

    def _connect(self, request: Connect) -> Reply:
        device = self._devices.get(request.device)
        if device is None:
            return Failed(f"there is no device {request.device}")
        end = self._ends.get(request.rail)
        if end is None:
            end = self._ends[request.rail] = OwnerEnd(device)
        if end.device is not device:
            return Failed(f"rail {request.rail} is on device {end.device.name}")
        return end.connect(request.end)
