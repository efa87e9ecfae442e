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
        self.start()

    def close(self) -> None:
        """Wait a moment for what is lent, then hang up on all peers."""
        with self._returned:
            self._returned.wait_for(lambda: not any(self._lent.values()), _RETURN_S)
        super().close()

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

    def _answer(self, connection: socket.socket, message: bytes) -> None:
        request = decode_request(message)
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
