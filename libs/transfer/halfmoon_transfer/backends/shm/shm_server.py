"""The owner's side: hands file descriptors of regions to whoever knows their keys.

One thread serves all peers: requests are tiny and answered from a table.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time

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
from halfmoon_transfer.notification_queue import NotificationQueue
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.regions.region_table import RegionTable

_log = logging.getLogger(__name__)
_ACCEPT_PAUSE_S = 0.1
#: How long peers may take for what they copy when we end.
_RETURN_S = 1.0


class ShmServer:
    """Listens at `address`, the name of an abstract Unix socket."""

    def __init__(
        self,
        regions: RegionTable,
        inbox: NotificationQueue,
        *,
        label: str,
        max_connections: int,
        our_user_only: bool,
    ) -> None:
        self.address = f"halfmoon-{secrets.token_hex(12)}"
        self.n_malformed = 0
        self._regions = regions
        self._inbox = inbox
        self._max_connections = max_connections
        self._our_user_only = our_user_only
        #: Keys granted over each open connection.
        self._granted: dict[socket.socket, set[bytes]] = {}
        #: Regions lent over each open connection, once for each time.
        self._lent: dict[socket.socket, list[RegionEntry]] = {}
        # Guards both, and that a revocation isn't overtaken by a grant.
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Peers connected now."""
        return len(self._granted)

    def revoke(self, key: bytes) -> None:
        """Tell all who were granted this region that it is gone."""
        message = encode_reply(ShmReply(REVOKED, AccessStatus.UNKNOWN_KEY, 0, key))
        with self._lock:
            for connection, keys in self._granted.items():
                if key in keys:
                    keys.discard(key)
                    _send(connection, message)

    def close(self) -> None:
        """Wait a moment for what is lent, then hang up on everybody."""
        with self._returned:
            self._returned.wait_for(lambda: not any(self._lent.values()), _RETURN_S)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake:
                        with self._lock:
                            for connection in self._granted:
                                self._take_back(connection)
                                connection.close()
                            self._granted.clear()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors, accepting fails at once and again: don't spin.
            _log.warning("a peer could not connect: %s", error)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        unwanted = self._unwanted(connection)
        if unwanted:
            _log.warning("a peer was turned away: %s", unwanted)
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            self._granted[connection] = set()
        selector.register(connection, selectors.EVENT_READ)

    def _unwanted(self, connection: socket.socket) -> str:
        """Why a connection is not taken; empty if it is."""
        if len(self._granted) >= self._max_connections:
            return f"{len(self._granted)} are connected"
        # Anybody in this network namespace can connect to an abstract socket.
        them = PeerCredentials.of(connection)
        if self._our_user_only and not them.is_our_user:
            return f"process {them.pid} runs as user {them.user}; {WITHIN_ONE_USER}"
        return ""

    def _serve(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Answer one request; hang up when there is none and won't be."""
        try:
            message = connection.recv(MAX_NOTIFICATION_FRAME_BYTES + 1)
            if message:
                self._answer(connection, message)
                return
        except BlockingIOError:
            return
        except ShmWireError as error:
            self.n_malformed += 1
            _log.warning("hanging up on a peer: %s", error)
        except OSError:
            pass
        selector.unregister(connection)
        with self._lock:
            del self._granted[connection]
            self._take_back(connection)
            connection.close()

    def _take_back(self, connection: socket.socket) -> None:
        """Whoever is gone touches nothing any more; with the lock held."""
        for entry in self._lent.pop(connection, ()):
            self._regions.leases.release(entry)
        self._returned.notify_all()

    def _answer(self, connection: socket.socket, message: bytes) -> None:
        ask = decode_request(message)
        if isinstance(ask, ShmNotification):
            self._note(connection, ask)
            return
        match ask:
            case ShmBorrowRequest():
                self._lend(connection, ask)
            case ShmReturn():
                self._receive_back(connection, ask)
            case _:
                self._grant(connection, ask)

    def _grant(self, connection: socket.socket, ask: ShmRegionRequest) -> None:
        with self._lock:
            try:
                fd, length = self._regions.duplicate_fd(ask.generation, ask.key)
            except AccessRefused as refused:
                notice = ShmReply(REFUSED, refused.status, refused.detail, ask.key)
                _send(connection, encode_reply(notice))
                return
            try:
                notice = ShmReply(GRANTED, AccessStatus.OK, length, ask.key)
                _send(connection, encode_reply(notice), fd)
                self._granted[connection].add(ask.key)
            finally:
                os.close(fd)

    def _lend(self, connection: socket.socket, ask: ShmBorrowRequest) -> None:
        """Say where a region is, to who could read our memory anyway."""
        try:
            if not PeerCredentials.of(connection).is_our_user:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            entry = self._regions.leases.acquire_whole(ask.generation, ask.key)
        except AccessRefused as refused:
            notice = ShmReply(REFUSED, refused.status, refused.detail, ask.key)
            _send(connection, encode_reply(notice))
            return
        with self._lock:
            self._lent.setdefault(connection, []).append(entry)
        lent = ShmLentRegion(ask.key, entry.address, len(entry.view), not entry.view.readonly)
        _send(connection, encode_lent(lent))

    def _receive_back(self, connection: socket.socket, returned: ShmReturn) -> None:
        with self._returned:
            for entry in self._lent.get(connection, ()):
                if entry.region.key == returned.key:
                    self._lent[connection].remove(entry)
                    self._regions.leases.release(entry)
                    break
            self._returned.notify_all()

    def _note(self, connection: socket.socket, note: ShmNotification) -> None:
        status, detail = AccessStatus.OK, 0
        try:
            self._inbox.deliver(note.generation, note.notice)
        except AccessRefused as refused:
            status, detail = refused.status, refused.detail
        with self._lock:
            _send(connection, encode_reply(ShmReply(NOTED, status, detail, note.notice.id)))


def _send(connection: socket.socket, message: bytes, *fds: int) -> None:
    """Send, or hang up: who reads so slowly that the socket is full can't be told anything."""
    try:
        if fds:
            socket.send_fds(connection, [message], fds)
        else:
            connection.send(message)
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
