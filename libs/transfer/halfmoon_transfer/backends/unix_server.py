"""Serve requests about regions over an abstract Unix socket: the owner's side.

One thread serves all peers: requests are small and answered from a table. What is granted to a peer
is remembered until it hangs up, so that a region's revocation reaches exactly those peers.
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from halfmoon_transfer.backends.peer_credentials import PeerCredentials

_log = logging.getLogger(__name__)
#: Without descriptors, `accept` fails at once and again: pause instead of spinning.
_ACCEPT_PAUSE_S = 0.1


class UnixServer(ABC):
    """Listens at `address`, the name of an abstract SOCK_SEQPACKET socket."""

    #: Begins the address, before random characters.
    prefix: ClassVar[str]
    #: The longest request in bytes.
    max_request_bytes: ClassVar[int]
    #: Raised by `_answer` for bytes that are no request; the peer is hung up on, and counted.
    malformed: ClassVar[type[Exception]]

    def __init__(self, *, label: str, max_connections: int) -> None:
        self.address = f"{self.prefix}{secrets.token_hex(12)}"
        self.n_malformed = 0
        self._max_connections = max_connections
        #: Keys granted over each open connection.
        self._granted: dict[socket.socket, set[bytes]] = {}
        # Guards `_granted`, and that a revocation isn't overtaken by a grant.
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.address)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)

    @abstractmethod
    def _answer(self, connection: socket.socket, message: bytes) -> None:
        """Answer one request with `_send`. Runs in the server's thread, without the lock.

        Raises:
            Exception: `malformed`, if it is no request.
        """

    @abstractmethod
    def _revocation(self, key: bytes) -> bytes:
        """Return the message that a region is gone."""

    @abstractmethod
    def _unwanted(self, peer: PeerCredentials) -> str:
        """Return why a peer is turned away; empty if it is welcome."""

    def _receive(self, connection: socket.socket) -> bytes:
        """Return one message, empty once the peer has hung up; raises like `socket.recv`."""
        return connection.recv(self.max_request_bytes + 1)

    def _on_hang_up(self, connection: socket.socket) -> None:  # noqa: B027
        """Release what a peer still holds; called with the lock held."""

    def start(self) -> None:
        """Begin to accept; peers that connected since construction have waited."""
        self._thread.start()

    @property
    def n_connections(self) -> int:
        """Peers connected now."""
        return len(self._granted)

    def revoke(self, key: bytes) -> None:
        """Tell the peers that were granted this region that it is gone."""
        message = self._revocation(key)
        with self._lock:
            for connection, keys in self._granted.items():
                if key in keys:
                    keys.discard(key)
                    self._send(connection, message)

    def close(self) -> None:
        """Hang up on all peers."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _send(self, connection: socket.socket, message: bytes, *fds: int) -> None:
        """Send, or cut off a peer that reads so slowly that its socket is full."""
        try:
            if fds:
                socket.send_fds(connection, [message], fds)
            else:
                connection.send(message)
        except OSError:
            self._cut_off(connection)

    def _cut_off(self, connection: socket.socket) -> None:
        """Send nothing more; the peer hangs up when it sees that. Called with or without the lock.

        What it holds is still known until then: it may be in the middle of a copy.
        """
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._wake:
                        self._hang_up_all()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._serve(selector, key.fileobj)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _log.warning("a peer could not connect: %s", error)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        unwanted = self._why_unwanted(connection)
        if unwanted:
            _log.warning("a peer was rejected: %s", unwanted)
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            self._granted[connection] = set()
        selector.register(connection, selectors.EVENT_READ)

    def _why_unwanted(self, connection: socket.socket) -> str:
        if len(self._granted) >= self._max_connections:
            return f"{len(self._granted)} are connected"
        # Any process in this network namespace can connect to an abstract socket.
        try:
            return self._unwanted(PeerCredentials.of(connection))
        except OSError as error:
            return f"it hung up: {error}"

    def _serve(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Answer one request; hang up when the peer did, or sent something else."""
        try:
            message = self._receive(connection)
            if message:
                self._answer(connection, message)
                return
        except BlockingIOError:
            return
        except self.malformed as error:
            self.n_malformed += 1
            _log.warning("hanging up on a peer: %s", error)
        except OSError:
            pass
        selector.unregister(connection)
        with self._lock:
            del self._granted[connection]
            self._on_hang_up(connection)
            connection.close()

    def _hang_up_all(self) -> None:
        with self._lock:
            for connection in self._granted:
                self._on_hang_up(connection)
                connection.close()
            self._granted.clear()
