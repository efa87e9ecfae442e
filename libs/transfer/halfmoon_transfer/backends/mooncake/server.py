"""Our side of both ports: regions served by address, records, messages, signs of life.

One thing is added on the data port, in Mooncake's own frames: a version 2 read of 0 bytes at
"address" E asks whether E is still our epoch. Answered 0, the connection is bound to it: once
a region has been taken back, the next request on it is refused and the connection closed, so
that a peer's memory of our addresses never outlives them. Other reads of 0 bytes are refused,
as Mooncake does.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

from halfmoon_transfer.backends.mooncake import frames, handshake, records
from halfmoon_transfer.backends.mooncake.exposed import Exposed
from halfmoon_transfer.backends.mooncake.frames import FrameError, Request
from halfmoon_transfer.backends.mooncake.handshake import Kind
from halfmoon_transfer.backends.mooncake.records import Notification, SegmentRecord
from halfmoon_transfer.backends.tcp.sockets import Closed, receive, receive_into, send_all
from halfmoon_transfer.regions import Entry, Refused

_log = logging.getLogger(__name__)
#: How long a refused peer may take to hear it and close.
_LINGER_S = 1.0


class DataPort:
    """Serves one segment's regions; `serve` runs in a thread per connection."""

    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed
        self._lock = threading.Lock()
        #: The region that a connection accesses now.
        self._accessing: dict[socket.socket, bytes] = {}

    def accessing(self, key: bytes) -> list[socket.socket]:
        """Connections that access this region now."""
        with self._lock:
            return [sock for sock, each in self._accessing.items() if each == key]

    def serve(self, sock: socket.socket) -> None:
        """Answer requests until the peer hangs up or is refused.

        Raises:
            FrameError: the peer sent something else.
            OSError: the connection broke, or stalled in the middle of a request.
        """
        epoch: int | None = None
        while (header := _next_header(sock)) is not None:
            request = frames.decode_request(header)
            if request.size == 0:
                if not self._is_epoch(request):
                    _refuse(sock, request)
                    return
                epoch = request.address
                send_all(sock, [frames.encode_status(frames.APPLIED)])
            elif not self._answer(sock, request, epoch):
                _refuse(sock, request)
                return

    def _is_epoch(self, request: Request) -> bool:
        asks = request.version == 2 and not request.write
        return asks and request.address == self._exposed.epoch

    def _answer(self, sock: socket.socket, request: Request, epoch: int | None) -> bool:
        """Move the bytes; False if the address is refused."""
        try:
            entry, view = self._exposed.acquire(request.address, request.size, write=request.write)
        except Refused:
            return False
        try:
            # Only now: a region that was taken back before we got hold of this one counts.
            if epoch is not None and epoch != self._exposed.epoch:
                return False
            self._note(sock, entry)
            _move(sock, request, view)
        finally:
            self._note(sock, None)
            self._exposed.give_back(entry)
        return True

    def _note(self, sock: socket.socket, entry: Entry | None) -> None:
        with self._lock:
            if entry is None:
                self._accessing.pop(sock, None)
            else:
                self._accessing[sock] = entry.region.key


def _next_header(sock: socket.socket) -> memoryview | None:
    """The next request's header; None when the peer has hung up in between."""
    while True:
        try:
            # Idling between requests is fine, for as long as the peer likes.
            if not sock.recv(1, socket.MSG_PEEK):
                return None
        except BlockingIOError:
            continue
        try:
            return receive(sock, frames.HEADER_BYTES)
        except Closed as closed:
            raise FrameError("the peer hung up in the middle of a header") from closed


def _move(sock: socket.socket, request: Request, view: memoryview) -> None:
    applied = frames.encode_status(frames.APPLIED)
    if request.write:
        receive_into(sock, [view])
        if request.version == 2:
            send_all(sock, [applied])
    else:
        send_all(sock, [applied, view] if request.version == 2 else [view])


def _refuse(sock: socket.socket, request: Request) -> None:
    """Say so where that can be said. Bytes that come are read, lest they erase our words."""
    if request.version == 2:
        send_all(sock, [frames.encode_status(frames.REFUSED)])
        handshake.finish(sock, _LINGER_S)


class HandshakePort:
    """Answers handshakes; `serve` runs in a thread per connection."""

    def __init__(self, record: Callable[[], SegmentRecord], max_notifications: int) -> None:
        self._record = record
        self._max_notifications = max_notifications
        self._lock = threading.Lock()
        self._notifications: deque[Notification] = deque()

    def take(self) -> list[Notification]:
        """The messages that have come since last asked, oldest first."""
        with self._lock:
            taken = list(self._notifications)
            self._notifications.clear()
        return taken

    def serve(self, sock: socket.socket) -> None:
        """Answer one question.

        Raises:
            FrameError: it was none.
            OSError: the connection broke, or the peer is too slow.
        """
        try:
            kind, body = handshake.read(sock)
        except Closed as closed:
            if closed.clean:
                return
            raise FrameError("the peer hung up in the middle of a handshake") from closed
        try:
            answer = handshake.encode(kind, self._answer(kind, body))
        except records.RecordError as error:
            raise FrameError(str(error)) from error
        except ValueError as error:
            # Ours is too long, not theirs.
            _log.error("a peer can't have our record: %s", error)
            return
        send_all(sock, [answer])
        handshake.finish(sock, _LINGER_S)

    def _answer(self, kind: Kind, body: bytes) -> bytes:
        match kind:
            case Kind.METADATA:
                return records.encode(self._record())
            case Kind.NOTIFY:
                return handshake.notify_answer(self._keep(records.decode_notification(body)))
            case Kind.PROBE:
                return handshake.probe_answer()
            case Kind.CONNECTION:
                return handshake.connection_answer()

    def _keep(self, notification: Notification) -> str:
        """Why it was not taken; "" when it was."""
        with self._lock:
            if len(self._notifications) >= self._max_notifications:
                return f"{self._max_notifications} messages wait here already, the limit"
            self._notifications.append(notification)
        return ""
