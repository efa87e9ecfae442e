"""The owner's side of TCP: a listener, and a thread per accepted connection.

A connection that sends what is not our framing is told so and closed; it can't have written
anything outside a region, as every slice is bounds-checked before its bytes are read.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

from halfmoon_transfer.backends.tcp import frames
from halfmoon_transfer.backends.tcp.frames import Answered, FrameError, Hello, Request
from halfmoon_transfer.backends.tcp.sessions import Sessions
from halfmoon_transfer.backends.tcp.sockets import Closed, ReadAhead, send_all, tune
from halfmoon_transfer.copying import checksum
from halfmoon_transfer.notifications import Inbox
from halfmoon_transfer.regions import Refused, RegionTable, Spot, Status

_log = logging.getLogger(__name__)
_SCRAP_BYTES = 64 * 1024
#: Out of descriptors, accepting fails at once and again: don't spin.
_ACCEPT_PAUSE_S = 0.1
#: How long a peer that made no sense may take to hear why.
_LINGER_S = 0.2


class TcpServer:
    """Serves one segment's regions at `bind`:`port`."""

    def __init__(
        self,
        regions: RegionTable,
        inbox: Inbox,
        *,
        sessions: Sessions,
        bind: str,
        port: int,
        label: str,
        max_connections: int,
        stall_timeout_s: float,
    ) -> None:
        self.n_malformed = 0
        self._regions = regions
        self._inbox = inbox
        self._sessions = sessions
        self._label = label
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        #: Open connections and the threads that serve them.
        self._connections: dict[_Connection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listener = socket.create_server((bind, port), family=family, backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name=f"{label}-accept", daemon=True)
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Connections open now."""
        return len(self._connections)

    def evict(self, key: bytes) -> None:
        """Close the connections that access this region now."""
        with self._lock:
            for connection in self._connections:
                if key in connection.accessing:
                    connection.hang_up()

    def close(self) -> None:
        """Stop listening and hang up on everybody."""
        with self._lock:
            self._closed = True
            threads = list(self._connections.values())
            for connection in self._connections:
                connection.hang_up()
        # Closing alone would not wake the thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                _log.warning("%s: a peer could not connect: %s", self._label, error)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                crowded = len(self._connections) >= self._max_connections
                refused = f"{len(self._connections)} connections are open, the limit"
                connection = _Connection(
                    sock,
                    self._regions,
                    self._inbox,
                    self._sessions,
                    self._stall_timeout_s,
                    refused if crowded else "",
                )
                if crowded:
                    # Told so without a thread of its own: the line is short.
                    connection.turn_away()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name=f"{self._label}-serve", daemon=True
                )
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: "_Connection") -> None:
        try:
            connection.serve()
        except FrameError as error:
            with self._lock:
                self.n_malformed += 1
            _log.warning("%s: hanging up on a peer: %s", self._label, error)
        except OSError as error:
            _log.debug("%s: a connection ended: %s", self._label, error)
        finally:
            with self._lock:
                del self._connections[connection]
                connection.close()


class _Connection:
    """One accepted connection, served by one thread."""

    def __init__(
        self,
        sock: socket.socket,
        regions: RegionTable,
        inbox: Inbox,
        sessions: Sessions,
        stall_timeout_s: float,
        refused: str,
    ) -> None:
        self._socket = sock
        self._ahead = ReadAhead(sock)
        self._regions = regions
        self._inbox = inbox
        self._sessions = sessions
        #: Who it says it is, once greeted.
        self._greeted: Hello | None = None
        self._refused = refused
        #: Keys of the regions that the current request accesses.
        self.accessing: frozenset[bytes] = frozenset()
        self._scrap = memoryview(bytearray(0))
        tune(sock)
        # The kernel's own timeouts, so that one call can still wait for a whole buffer.
        seconds = int(stall_timeout_s)
        patience = struct.pack("@ll", seconds, int((stall_timeout_s - seconds) * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)

    def hang_up(self) -> None:
        """Wake the thread that serves it, from another one; it closes the socket."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()
        if self._greeted is not None:
            self._sessions.leave(self._greeted.session, self._greeted.number)

    def turn_away(self) -> None:
        """Say that there is no room, if that can be said without waiting."""
        hello = Hello(self._regions.segment, self._regions.generation, self._refused)
        with self._socket, contextlib.suppress(OSError):
            self._socket.send(frames.encode_hello(hello), socket.MSG_DONTWAIT)

    def serve(self) -> None:
        """Greet, then answer requests until the peer hangs up.

        Raises:
            FrameError: the peer sent something else.
            OSError: the connection broke, or stalled in the middle of a frame.
        """
        try:
            if not self._greet():
                return
            while (header := self._next_header()) is not None:
                rest = self._ahead.take(frames.request_rest_bytes(header))
                request = frames.decode_request(header, rest)
                if request.op == frames.NOTIFY:
                    self._note(request)
                else:
                    self._answer(request)
        except FrameError as error:
            self._complain(str(error))
            raise

    def _complain(self, text: str) -> None:
        """Say what was wrong; closing at once on unread bytes would take the words back."""
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self._socket.send(frames.encode_failure(text), socket.MSG_DONTWAIT)
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_SCRAP_BYTES):
                    return

    def _greet(self) -> bool:
        header = self._ahead.take(frames.HELLO_HEADER_BYTES)
        hello = frames.decode_hello(self._ahead.take(frames.hello_bytes(header)))
        regions = self._regions
        refused = ""
        if (hello.segment, hello.generation) != (regions.segment, regions.generation):
            refused = (
                f"this is segment {regions.segment}, generation {regions.generation}, "
                f"not {hello.segment:.200}, generation {hello.generation}"
            )
        elif hello.over and not self._sessions.end(hello.session, hello.over):
            refused = "an earlier connection of yours has not ended yet"
        elif hello.session:
            self._greeted = hello
            self._sessions.enter(hello.session, hello.number, self.hang_up)
        own = Hello(regions.segment, regions.generation, refused)
        send_all(self._socket, [frames.encode_hello(own)])
        return not refused

    def _next_header(self) -> memoryview | None:
        """The next request's header; None when the peer has hung up in between."""
        while True:
            try:
                # Idling between requests is fine, for as long as the peer likes.
                if not self._ahead.wait():
                    return None
            except BlockingIOError:
                continue
            try:
                return self._ahead.take(frames.HEADER_BYTES)
            except Closed as closed:
                raise FrameError("the peer hung up in the middle of a header") from closed

    def _answer(self, request: Request) -> None:
        self.accessing = frozenset(each.key for each in request.slices)
        write = request.op == frames.WRITE
        spans = [(each.key, each.offset, each.length) for each in request.slices]
        with self._regions.lease_batch(request.generation, spans, write=write) as views:
            if write:
                self._take(request, views)
            else:
                self._give(request, views)
        self.accessing = frozenset()

    def _note(self, request: Request) -> None:
        """Put a notice into the inbox and say so."""
        (asked,) = request.slices
        notice = frames.decode_notice(asked, self._ahead.take(asked.length))
        answer = _FINE
        try:
            self._inbox.deliver(request.generation, notice)
        except Refused as refused:
            answer = _refused(refused)
        send_all(self._socket, [frames.encode_reply(frames.NOTIFY, request.number, [answer])])

    def _take(self, request: Request, views: list[memoryview | Refused]) -> None:
        """Read the slices' bytes into place, check them, acknowledge."""
        buffers: list[memoryview] = []
        for each, view in zip(request.slices, views, strict=True):
            if isinstance(view, Refused):
                buffers.extend(self._scraps(each.length))
            else:
                buffers.append(view)
        self._ahead.fill(buffers)
        if request.checksums:
            for index, (each, view) in enumerate(zip(request.slices, views, strict=True)):
                if not isinstance(view, Refused) and checksum(view) != each.checksum:
                    views[index] = Refused(Status.CHECKSUM_MISMATCH)
        if self._regions.has_files:
            _settle(self._regions.store, request, views)
        answers = [_refused(view) if isinstance(view, Refused) else _FINE for view in views]
        send_all(self._socket, [frames.encode_reply(frames.WRITE, request.number, answers)])

    def _give(self, request: Request, views: list[memoryview | Refused]) -> None:
        """Send the slices' bytes from where they are."""
        if self._regions.has_files:
            _settle(self._regions.load, request, views)
        answers = [
            _refused(view)
            if isinstance(view, Refused)
            else Answered(Status.OK, checksum(view))
            if request.checksums
            else _FINE
            for view in views
        ]
        given = [view for view in views if not isinstance(view, Refused)]
        head = frames.encode_reply(frames.READ, request.number, answers)
        send_all(self._socket, [head, *given])

    def _scraps(self, n_bytes: int) -> list[memoryview]:
        """Room to read bytes into that nobody wants: the same piece again and again."""
        if not self._scrap:
            self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        whole, part = divmod(n_bytes, _SCRAP_BYTES)
        return [self._scrap] * whole + ([self._scrap[:part]] if part else [])


_FINE = Answered(Status.OK)


def _refused(refused: Refused) -> Answered:
    return Answered(refused.status, refused.detail)


def _settle(
    settle: Callable[[Mapping[int, Spot]], dict[int, Refused]],
    request: Request,
    views: list[memoryview | Refused],
) -> None:
    """See that files give, or take, the bytes of the slices that are fine so far."""
    spots = {
        index: Spot(each.key, each.offset, view)
        for index, (each, view) in enumerate(zip(request.slices, views, strict=True))
        if not isinstance(view, Refused)
    }
    for index, refused in settle(spots).items():
        views[index] = refused
