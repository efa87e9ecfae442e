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

from halfmoon_transfer.backends.mooncake import (
    mooncake_frames,
    mooncake_handshake,
    mooncake_records,
)
from halfmoon_transfer.backends.mooncake.exposed_regions import ExposedRegions
from halfmoon_transfer.backends.mooncake.mooncake_frames import MooncakeFrameError, MooncakeRequest
from halfmoon_transfer.backends.mooncake.mooncake_handshake import HandshakeKind
from halfmoon_transfer.backends.mooncake.mooncake_records import MooncakeNotification, SegmentRecord
from halfmoon_transfer.backends.socket_io import SocketClosed, receive, receive_into, send_all
from halfmoon_transfer.regions.region_table import AccessRefused, RegionEntry

_log = logging.getLogger(__name__)
#: How long a refused peer may take to hear it and close.
_LINGER_S = 1.0


class DataPort:
    """Serves one segment's regions; `serve` runs in a thread per connection."""

    def __init__(self, exposed: ExposedRegions) -> None:
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
            request = mooncake_frames.decode_request(header)
            if request.size == 0:
                if not self._is_epoch(request):
                    _refuse(sock, request)
                    return
                epoch = request.address
                send_all(sock, [mooncake_frames.encode_status(mooncake_frames.APPLIED)])
            elif not self._answer(sock, request, epoch):
                _refuse(sock, request)
                return

    def _is_epoch(self, request: MooncakeRequest) -> bool:
        asks = request.version == 2 and not request.write
        return asks and request.address == self._exposed.epoch

    def _answer(self, sock: socket.socket, request: MooncakeRequest, epoch: int | None) -> bool:
        """Move the bytes; False if the address is refused."""
        try:
            entry, view = self._exposed.acquire(request.address, request.size, write=request.write)
        except AccessRefused:
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

    def _note(self, sock: socket.socket, entry: RegionEntry | None) -> None:
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
            return receive(sock, mooncake_frames.HEADER_BYTES)
        except SocketClosed as closed:
            raise MooncakeFrameError("the peer hung up in the middle of a header") from closed


def _move(sock: socket.socket, request: MooncakeRequest, view: memoryview) -> None:
    applied = mooncake_frames.encode_status(mooncake_frames.APPLIED)
    if request.write:
        receive_into(sock, [view])
        if request.version == 2:
            send_all(sock, [applied])
    else:
        send_all(sock, [applied, view] if request.version == 2 else [view])


def _refuse(sock: socket.socket, request: MooncakeRequest) -> None:
    """Say so where that can be said. Bytes that come are read, lest they erase our words."""
    if request.version == 2:
        send_all(sock, [mooncake_frames.encode_status(mooncake_frames.REFUSED)])
        mooncake_handshake.half_close(sock, _LINGER_S)


class HandshakePort:
    """Answers handshakes; `serve` runs in a thread per connection."""

    def __init__(self, record: Callable[[], SegmentRecord], max_notifications: int) -> None:
        self._record = record
        self._max_notifications = max_notifications
        self._lock = threading.Lock()
        self._notifications: deque[MooncakeNotification] = deque()

    def take(self) -> list[MooncakeNotification]:
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
            kind, body = mooncake_handshake.read_message(sock)
        except SocketClosed as closed:
            if closed.clean:
                return
            raise MooncakeFrameError("the peer hung up in the middle of a handshake") from closed
        try:
            answer = mooncake_handshake.encode(kind, self._answer(kind, body))
        except mooncake_records.RecordError as error:
            raise MooncakeFrameError(str(error)) from error
        except ValueError as error:
            # Ours is too long, not theirs.
            _log.error("a peer can't have our record: %s", error)
            return
        send_all(sock, [answer])
        mooncake_handshake.half_close(sock, _LINGER_S)

    def _answer(self, kind: HandshakeKind, body: bytes) -> bytes:
        match kind:
            case HandshakeKind.METADATA:
                return mooncake_records.encode(self._record())
            case HandshakeKind.NOTIFY:
                return mooncake_handshake.notify_answer(
                    self._keep(mooncake_records.decode_notification(body))
                )
            case HandshakeKind.PROBE:
                return mooncake_handshake.probe_answer()
            case HandshakeKind.CONNECTION:
                return mooncake_handshake.connection_answer()

    def _keep(self, notification: MooncakeNotification) -> str:
        """Why it was not taken; "" when it was."""
        with self._lock:
            if len(self._notifications) >= self._max_notifications:
                return f"{self._max_notifications} messages wait here already, the limit"
            self._notifications.append(notification)
        return ""
