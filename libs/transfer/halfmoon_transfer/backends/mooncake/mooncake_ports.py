"""Serve the data port (regions by address) and the handshake port (records, messages, probes).

The data port has one extension in Mooncake's own frames: a version 2 read of 0 bytes at
"address" E asks if E is still our epoch. Status 0 binds the connection to the epoch. Once a
region has been unregistered, the next request is refused and the connection closed. So the
addresses that a peer knows never outlive the regions. Other reads of 0 bytes are refused, as
Mooncake does.
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
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.regions.region_index import RegionEntry

_log = logging.getLogger(__name__)
#: Seconds in which a refused peer should read the status and close.
_LINGER_S = 1.0


class DataPort:
    """Serve one segment's regions; `serve` runs in a thread per connection."""

    def __init__(self, exposed: ExposedRegions) -> None:
        self._exposed = exposed
        self._lock = threading.Lock()
        #: Key of the region that each connection accesses now.
        self._accessing: dict[socket.socket, bytes] = {}

    def accessing(self, key: bytes) -> list[socket.socket]:
        """Return the connections that access this region now."""
        with self._lock:
            return [sock for sock, each in self._accessing.items() if each == key]

    def serve(self, sock: socket.socket) -> None:
        """Answer requests until the peer closes the connection or is refused.

        Raises:
            MooncakeFrameError: the peer violates the protocol.
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
        is_query = request.version == 2 and not request.write
        return is_query and request.address == self._exposed.epoch

    def _answer(self, sock: socket.socket, request: MooncakeRequest, epoch: int | None) -> bool:
        """Move the bytes; return False if the address is refused."""
        try:
            entry, view = self._exposed.acquire(request.address, request.size, write=request.write)
        except AccessRefused:
            return False
        try:
            # Compare after acquiring: a region unregistered before that has changed the epoch.
            if epoch is not None and epoch != self._exposed.epoch:
                return False
            self._set_accessing(sock, entry)
            _move(sock, request, view)
        finally:
            self._set_accessing(sock, None)
            self._exposed.give_back(entry)
        return True

    def _set_accessing(self, sock: socket.socket, entry: RegionEntry | None) -> None:
        with self._lock:
            if entry is None:
                self._accessing.pop(sock, None)
            else:
                self._accessing[sock] = entry.region.key


def _next_header(sock: socket.socket) -> memoryview | None:
    """Read the next request's header; None when the peer closed between two requests."""
    while True:
        try:
            # A connection may idle between requests for any time.
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
    """Send the refusal in version 2; read incoming bytes, so that no reset discards it."""
    if request.version == 2:
        send_all(sock, [mooncake_frames.encode_status(mooncake_frames.REFUSED)])
        mooncake_handshake.half_close(sock, _LINGER_S)


class HandshakePort:
    """Answer handshakes; `serve` runs in a thread per connection."""

    def __init__(self, record: Callable[[], SegmentRecord], max_notifications: int) -> None:
        self._record = record
        self._max_notifications = max_notifications
        self._lock = threading.Lock()
        self._notifications: deque[MooncakeNotification] = deque()

    def take(self) -> list[MooncakeNotification]:
        """Return the messages received since the last call, oldest first."""
        with self._lock:
            taken = list(self._notifications)
            self._notifications.clear()
        return taken

    def serve(self, sock: socket.socket) -> None:
        """Answer one request.

        Raises:
            MooncakeFrameError: the bytes are not a handshake.
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
            # Our answer is too long, not the request.
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
        """Keep a message; return "" or the reason of a refusal."""
        with self._lock:
            if len(self._notifications) >= self._max_notifications:
                return f"{self._max_notifications} messages wait here already, the limit"
            self._notifications.append(notification)
        return ""
