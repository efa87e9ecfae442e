"""Answer requests on accepted TCP connections: the owner's side.

A connection that sends bytes that are no frame gets an error and is closed. It can't have written
outside of a region, as every slice is bounds-checked before its bytes are read.
"""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from halfmoon_transfer.backends.peer_text import printable_text
from halfmoon_transfer.backends.socket_io import (
    ByteStream,
    ReadAhead,
    SocketClosed,
    hang_up,
    send_all,
)
from halfmoon_transfer.backends.socket_listener import SocketListener
from halfmoon_transfer.backends.tcp import tcp_frames
from halfmoon_transfer.backends.tcp.native import NativeServer, can_encrypt
from halfmoon_transfer.backends.tcp.record_keys import KeyExchange, RecordKeys
from halfmoon_transfer.backends.tcp.record_layer import encrypt_socket
from halfmoon_transfer.backends.tcp.tcp_frames import (
    SliceReply,
    TcpFrameError,
    TcpHello,
    TcpProof,
    TcpRequest,
)
from halfmoon_transfer.backends.tcp.tcp_sessions import TcpSessions
from halfmoon_transfer.cluster_key import ClusterKey, ProverRole, key_mismatch_hint, make_nonce
from halfmoon_transfer.encryption_setting import encryption_mismatch_hint
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.backed_regions import RegionSpan
from halfmoon_transfer.regions.byte_ops import checksum
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)
_SINK_BYTES = 64 * 1024
#: How long a peer that sent no frame may take to read the error.
_LINGER_S = 0.2


class TcpServer:
    """Serves one segment's regions at `bind`:`port`."""

    def __init__(
        self,
        regions: RegionTable,
        notification_queue: NotificationQueue,
        *,
        sessions: TcpSessions,
        key: ClusterKey | None,
        encrypt: bool,
        bind: str,
        port: int,
        label: str,
        max_connections: int,
        stall_timeout_s: float,
        native: NativeServer | None = None,
    ) -> None:
        self._native = native
        self._regions = regions
        self._notification_queue = notification_queue
        self._sessions = sessions
        self._key = key
        self._encrypt = encrypt
        #: Connections being served.
        self._connections: set[_Connection] = set()
        #: Those that `hang_up` closed and whose threads may go on; guarded by `_lock`.
        self._hung_up: set[_Connection] = set()
        self._lock = threading.Lock()
        self._listener = SocketListener(
            self._serve,
            malformed=TcpFrameError,
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
        """Connections open now."""
        return self._listener.n_connections

    @property
    def n_malformed(self) -> int:
        """Connections closed because of malformed frames."""
        return self._listener.n_malformed

    def evict(self, key: bytes) -> None:
        """Close the connections that access this region now."""
        with self._lock:
            for connection in self._connections:
                if key in connection.accessing:
                    connection.hang_up()

    def hang_up(self) -> None:
        """Close all connections; peers may open others."""
        with self._lock:
            for connection in self._connections:
                connection.hang_up()
            self._hung_up |= self._connections

    def is_quiet(self) -> bool:
        """Return whether the threads of all connections that were closed so have ended."""
        with self._lock:
            self._hung_up &= self._connections
            return not self._hung_up

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()

    def _farewell(self, reason: str) -> bytes:
        return tcp_frames.encode_hello(
            TcpHello(self._regions.segment, self._regions.generation, reason)
        )

    def _serve(self, sock: socket.socket) -> None:
        connection = _Connection(
            sock,
            self._regions,
            self._notification_queue,
            self._sessions,
            self._key,
            self._native,
            encrypt=self._encrypt,
        )
        with self._lock:
            self._connections.add(connection)
        try:
            connection.serve()
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.leave()


class _Connection:
    """One accepted connection, served by one thread."""

    def __init__(
        self,
        sock: socket.socket,
        regions: RegionTable,
        notification_queue: NotificationQueue,
        sessions: TcpSessions,
        key: ClusterKey | None,
        native: NativeServer | None,
        *,
        encrypt: bool,
    ) -> None:
        self._native = native
        self._socket = sock
        #: The socket, or what encrypts it once both sides have proven the cluster key.
        self._stream: ByteStream = sock
        self._ahead = ReadAhead(sock)
        self._regions = regions
        self._notification_queue = notification_queue
        self._sessions = sessions
        self._key = key
        #: Our part in agreeing on keys; None on a connection in the clear.
        self._exchange = KeyExchange() if key is not None and encrypt else None
        #: The peer's hello, once greeted.
        self._greeted: TcpHello | None = None
        #: Keys of the regions that the current request accesses.
        self.accessing: frozenset[bytes] = frozenset()
        self._sink = memoryview(bytearray(0))

    def hang_up(self) -> None:
        """Wake the serving thread from another one; it then closes the socket."""
        hang_up(self._socket)

    def leave(self) -> None:
        """Leave the session: nothing is read from the connection any more."""
        if self._greeted is not None:
            self._sessions.leave(self._greeted.session, self._greeted.number)

    def serve(self) -> None:
        """Greet, then answer requests until the peer hangs up.

        Raises:
            TcpFrameError: the peer sent something else.
            OSError: the connection broke, or stalled in the middle of a frame.
        """
        try:
            if not self._greet():
                return
            while (header := self._next_header()) is not None:
                rest = self._ahead.take(tcp_frames.request_rest_bytes(header))
                request = tcp_frames.decode_request(header, rest)
                if request.op == tcp_frames.NOTIFY:
                    self._on_notification(request)
                else:
                    self._answer(request)
        except TcpFrameError as error:
            self._send_failure(str(error))
            raise
        except OSError as error:
            if error.errno != errno.EBADMSG:
                raise
            self._send_failure(str(error.strerror))
            raise TcpFrameError(error.strerror) from None

    def _send_failure(self, text: str) -> None:
        """Send the error and wait: closing at once with unread bytes would discard it."""
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self._socket.setblocking(False)
            send_all(self._stream, [tcp_frames.encode_failure(text)])
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_SINK_BYTES):
                    return

    def _greet(self) -> bool:
        header = self._ahead.take(tcp_frames.HELLO_HEADER_BYTES)
        received_hello = bytes(self._ahead.take(tcp_frames.hello_bytes(header)))
        hello = tcp_frames.decode_hello(received_hello)
        own = TcpHello(
            self._regions.segment,
            self._regions.generation,
            self._why_refused(hello),
            nonce=b"" if self._key is None else make_nonce(),
            share=b"" if self._exchange is None else self._exchange.share,
        )
        if self._key is None and not own.refused:
            own = msgspec.structs.replace(own, refused=self._enter(hello))
        answer = tcp_frames.encode_hello(own)
        send_all(self._socket, [answer])
        if self._key is None or own.refused:
            return not own.refused
        maps = received_hello, answer[tcp_frames.HELLO_HEADER_BYTES :]
        proven, verdict = self._examine(self._key, hello, *maps)
        keys = None
        if proven is not None:
            if self._exchange is not None:
                # Before anything is cut or proven for a peer whose share gives no secret.
                keys = self._exchange.agree(proven, hello.share, *maps)
            verdict = msgspec.structs.replace(verdict, refused=self._enter(hello))
        send_all(self._socket, [tcp_frames.encode_proof(verdict)])
        if proven is None or verdict.refused:
            return False
        if keys is not None:
            self._encrypt(keys)
        return True

    def _encrypt(self, keys: RecordKeys) -> None:
        """Encrypt all that follows."""
        if not self._ahead.empty:
            raise TcpFrameError("bytes that belong to no frame, before the first request")
        self._stream = encrypt_socket(
            self._socket, keys.owner, keys.initiator, use_native=self._native is not None
        )
        self._ahead = ReadAhead(self._stream)
        if not can_encrypt():
            self._native = None

    def _why_refused(self, hello: TcpHello) -> str:
        """Return why the peer's hello is refused; empty if it isn't."""
        regions = self._regions
        if self._key is not None and not hello.nonce:
            _log.warning("%s: refused, it has no cluster key", self._who(hello))
            return key_mismatch_hint("there", "here")
        if self._key is not None and bool(hello.share) != bool(self._exchange):
            sides = ("here", "there") if hello.share else ("there", "here")
            _log.warning("%s: refused, only one side encrypts", self._who(hello))
            return encryption_mismatch_hint(*sides)
        if (hello.segment, hello.generation) != (regions.segment, regions.generation):
            return (
                f"this is segment {regions.segment}, generation {regions.generation}, "
                f"not {hello.segment:.200}, generation {hello.generation}"
            )
        return ""

    def _examine(
        self, key: ClusterKey, hello: TcpHello, received_hello: bytes, sent_hello: bytes
    ) -> tuple[ClusterKey | None, TcpProof]:
        """Check the peer's proof; return the key it proves, and our own proof or our refusal."""
        header = self._ahead.take(tcp_frames.HELLO_HEADER_BYTES)
        theirs = tcp_frames.decode_proof(self._ahead.take(tcp_frames.proof_bytes(header)))
        maps = received_hello, sent_hello
        proven = key.find_proven(theirs.proof, ProverRole.INITIATOR, *maps)
        if proven is None:
            _log.warning("%s: refused, it has another cluster key", self._who(hello))
            return None, TcpProof(refused="another cluster key is set there than here")
        return proven, TcpProof(proven.prove(ProverRole.OWNER, *maps))

    def _enter(self, hello: TcpHello) -> str:
        """Record the connection in the peer's session; return why that can't be."""
        if hello.over and not self._sessions.end(hello.session, hello.over):
            return "an earlier connection of yours has not ended yet"
        if hello.session:
            self._greeted = hello
            self._sessions.enter(hello.session, hello.number, self.hang_up)
        return ""

    def _who(self, hello: TcpHello) -> str:
        return f"segment {printable_text(hello.origin[:200])} at {self._socket.getpeername()[0]}"

    def _next_header(self) -> memoryview | None:
        """Return the next request's header; None when the peer has hung up before it."""
        if self._native is not None:
            self._native.serve(self._stream, self._ahead)
        while True:
            try:
                # A peer may idle between requests without limit.
                if not self._ahead.wait():
                    return None
            except BlockingIOError:
                continue
            try:
                return self._ahead.take(tcp_frames.HEADER_BYTES)
            except SocketClosed as closed:
                raise TcpFrameError("the peer hung up in the middle of a header") from closed

    def _answer(self, request: TcpRequest) -> None:
        self.accessing = frozenset(each.key for each in request.slices)
        write = request.op == tcp_frames.WRITE
        spans = [(each.key, each.offset, each.length) for each in request.slices]
        with self._regions.leases.lease_batch(request.generation, spans, write=write) as views:
            if write:
                self._write(request, views)
            else:
                self._read(request, views)
        if self._native is not None:
            self._native.serve_regions(self.accessing)
        self.accessing = frozenset()

    def _on_notification(self, request: TcpRequest) -> None:
        """Queue a notification and acknowledge it."""
        (entry,) = request.slices
        notification = tcp_frames.decode_notification(entry, self._ahead.take(entry.length))
        answer = _FINE
        try:
            self._notification_queue.deliver(request.generation, notification)
        except AccessRefused as refused:
            answer = _refused(refused)
        send_all(
            self._stream, [tcp_frames.encode_reply(tcp_frames.NOTIFY, request.number, [answer])]
        )

    def _write(self, request: TcpRequest, views: list[memoryview | AccessRefused]) -> None:
        """Read the slices' bytes into place, check them, acknowledge."""
        buffers: list[memoryview] = []
        for each, view in zip(request.slices, views, strict=True):
            if isinstance(view, AccessRefused):
                buffers.extend(self._sinks(each.length))
            else:
                buffers.append(view)
        self._ahead.fill(buffers)
        if request.checksums:
            for index, (each, view) in enumerate(zip(request.slices, views, strict=True)):
                if not isinstance(view, AccessRefused) and checksum(view) != each.checksum:
                    views[index] = AccessRefused(AccessStatus.CHECKSUM_MISMATCH)
        if self._regions.backed:
            _move_backed(self._regions.backed.store, request, views)
        answers = [_refused(view) if isinstance(view, AccessRefused) else _FINE for view in views]
        send_all(self._stream, [tcp_frames.encode_reply(tcp_frames.WRITE, request.number, answers)])

    def _read(self, request: TcpRequest, views: list[memoryview | AccessRefused]) -> None:
        """Send the slices' bytes from where they are."""
        if self._regions.backed:
            _move_backed(self._regions.backed.load, request, views)
        answers = [
            _refused(view)
            if isinstance(view, AccessRefused)
            else SliceReply(AccessStatus.OK, checksum(view))
            if request.checksums
            else _FINE
            for view in views
        ]
        given = [view for view in views if not isinstance(view, AccessRefused)]
        head = tcp_frames.encode_reply(tcp_frames.READ, request.number, answers)
        send_all(self._stream, [head, *given])

    def _sinks(self, n_bytes: int) -> list[memoryview]:
        """Return buffers for bytes that are dropped: the same piece again and again."""
        if not self._sink:
            self._sink = memoryview(bytearray(_SINK_BYTES))
        whole, part = divmod(n_bytes, _SINK_BYTES)
        return [self._sink] * whole + ([self._sink[:part]] if part else [])


_FINE = SliceReply(AccessStatus.OK)


def _refused(refused: AccessRefused) -> SliceReply:
    return SliceReply(refused.status, refused.detail)


def _move_backed(
    move: Callable[[Mapping[int, RegionSpan]], dict[int, AccessRefused]],
    request: TcpRequest,
    views: list[memoryview | AccessRefused],
) -> None:
    """Load or store the bytes of files and devices, for slices that are not refused."""
    spans = {
        index: RegionSpan(each.key, each.offset, view)
        for index, (each, view) in enumerate(zip(request.slices, views, strict=True))
        if not isinstance(view, AccessRefused)
    }
    for index, refused in move(spans).items():
        views[index] = refused
