"""Hand out file descriptors of regions, and lend regions that can't be mapped: the owner's side."""

import os
import socket
import threading

from halfmoon_transfer.backends.peer_credentials import WITHIN_ONE_USER, PeerCredentials
from halfmoon_transfer.backends.shm.shm_wire import (
    GRANTED,
    MAX_NOTIFICATION_FRAME_BYTES,
    NOTED,
    REFUSED,
    REVOKED,
    ShmBorrowRequest,
    ShmLentRegion,
    ShmNotification,
    ShmRegionRequest,
    ShmReply,
    ShmReturn,
    ShmWireError,
    decode_request,
    encode_lent,
    encode_reply,
)
from halfmoon_transfer.backends.shm.write_mark import count_of_copies, is_mark
from halfmoon_transfer.backends.unix_server import UnixServer
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.regions.region_table import RegionTable

#: How long `close` waits for regions that peers are still copying.
_RETURN_S = 1.0


class ShmServer(UnixServer):
    """Serves regions in memory, and takes notifications."""

    prefix = "halfmoon-"
    max_request_bytes = MAX_NOTIFICATION_FRAME_BYTES
    malformed = ShmWireError

    def __init__(
        self,
        regions: RegionTable,
        notification_queue: NotificationQueue,
        *,
        label: str,
        max_connections: int,
        our_user_only: bool,
    ) -> None:
        super().__init__(label=label, max_connections=max_connections)
        self._regions = regions
        self._notification_queue = notification_queue
        self._our_user_only = our_user_only
        #: Regions lent over each open connection, once per request; guarded by `_lock`.
        self._lent: dict[socket.socket, list[RegionEntry]] = {}
        self._returned = threading.Condition(self._lock)
        #: The write mark of each open connection that sent one; guarded by `_lock`.
        self._marks: dict[socket.socket, int] = {}
        #: Open connections that we have cut off; guarded by `_lock`.
        self._cut: set[socket.socket] = set()
        self.start()

    def close(self) -> None:
        """Wait a moment for what is lent, then hang up on all peers."""
        with self._returned:
            self._returned.wait_for(lambda: not any(self._lent.values()), _RETURN_S)
        super().close()

    def cut_off(self) -> None:
        """Cut off all peers: no copy of theirs begins any more over these connections."""
        with self._lock:
            for connection in self._granted:
                self._cut_off(connection)
                self._cut.add(connection)

    def is_quiet(self) -> bool:
        """Return whether no peer that was cut off may still be in the middle of a copy."""
        with self._lock:
            return not any(self._lent.get(each) or self._n_copies(each) for each in self._cut)

    def _n_copies(self, connection: socket.socket) -> int:
        """Return how many copies a peer shows; 0 for one without a mark."""
        fd = self._marks.get(connection)
        try:
            return 0 if fd is None else count_of_copies(fd)
        except OSError:
            return 0

    def _receive(self, connection: socket.socket) -> bytes:
        message, fds, _, _ = socket.recv_fds(
            connection, self.max_request_bytes + 1, 1, socket.MSG_CMSG_CLOEXEC
        )
        for fd in fds:
            with self._lock:
                if connection not in self._marks and is_mark(fd):
                    self._marks[connection] = fd
                else:
                    os.close(fd)
        return message

    def _revocation(self, key: bytes) -> bytes:
        return encode_reply(ShmReply(REVOKED, AccessStatus.UNKNOWN_KEY, 0, key))

    def _unwanted(self, peer: PeerCredentials) -> str:
        if self._our_user_only and not peer.is_our_user:
            return f"process {peer.pid} runs as user {peer.user}; {WITHIN_ONE_USER}"
        return ""

    def _on_hang_up(self, connection: socket.socket) -> None:
        # A peer that is gone reads and writes nothing any more.
        for entry in self._lent.pop(connection, ()):
            self._regions.leases.release(entry)
        self._returned.notify_all()
        self._cut.discard(connection)
        if (mark := self._marks.pop(connection, None)) is not None:
            os.close(mark)

    def _answer(self, connection: socket.socket, message: bytes) -> None:
        request = decode_request(message)
        if connection in self._cut and not isinstance(request, ShmReturn):
            return  # it will see that no answer comes
        if isinstance(request, ShmNotification):
            self._on_notification(connection, request)
            return
        match request:
            case ShmBorrowRequest():
                self._lend(connection, request)
            case ShmReturn():
                self._on_returned(connection, request)
            case _:
                self._grant(connection, request)

    def _grant(self, connection: socket.socket, request: ShmRegionRequest) -> None:
        with self._lock:
            try:
                fd, length = self._regions.duplicate_fd(request.generation, request.key)
            except AccessRefused as refused:
                self._refuse(connection, request.key, refused)
                return
            try:
                reply = ShmReply(GRANTED, AccessStatus.OK, length, request.key)
                self._send(connection, encode_reply(reply), fd)
                self._granted[connection].add(request.key)
            finally:
                os.close(fd)

    def _lend(self, connection: socket.socket, request: ShmBorrowRequest) -> None:
        """Send a region's address to a peer that may read our memory anyway."""
        try:
            if not PeerCredentials.of(connection).is_our_user:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            entry = self._regions.leases.acquire_whole(request.generation, request.key)
        except AccessRefused as refused:
            self._refuse(connection, request.key, refused)
            return
        with self._lock:
            self._lent.setdefault(connection, []).append(entry)
        lent = ShmLentRegion(request.key, entry.address, entry.n_bytes, entry.writable)
        self._send(connection, encode_lent(lent))

    def _refuse(self, connection: socket.socket, key: bytes, refused: AccessRefused) -> None:
        reply = ShmReply(REFUSED, refused.status, refused.detail, key)
        self._send(connection, encode_reply(reply))

    def _on_returned(self, connection: socket.socket, returned: ShmReturn) -> None:
        with self._returned:
            for entry in self._lent.get(connection, ()):
                if entry.region.key == returned.key:
                    self._lent[connection].remove(entry)
                    self._regions.leases.release(entry)
                    break
            self._returned.notify_all()

    def _on_notification(self, connection: socket.socket, message: ShmNotification) -> None:
        status, detail = AccessStatus.OK, 0
        try:
            self._notification_queue.deliver(message.generation, message.notification)
        except AccessRefused as refused:
            status, detail = refused.status, refused.detail
        reply = ShmReply(NOTED, status, detail, message.notification.id)
        with self._lock:
            self._send(connection, encode_reply(reply))
