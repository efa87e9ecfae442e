"""Ask an owner about its regions over a Unix socket: the initiator's side.

The connection proves that the owner is alive. It is checked before and after each use of the
owner's memory. Once it has closed the memory has no owner, and what was done to it counts as lost.
"""

import os
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from halfmoon_transfer.backends.peer_credentials import PeerCredentials
from halfmoon_transfer.planning.transfer_plan import OutcomeKind
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.threads.stop_signal import StopSignal

_POLL_S = 0.05

Reply = TypeVar("Reply")


class UnixPeerGone(Exception):
    """An owner that can't be reached, hung up, or sent nonsense; the text says which."""

    kind = OutcomeKind.LOST


class UnixNotListening(UnixPeerGone):
    """An owner that does not listen, or does not answer: retries will not change that."""

    kind = OutcomeKind.UNREACHABLE


class UnixPeer(ABC, Generic[Reply]):
    """One connection to one start of one owner. Methods are safe from any thread."""

    #: How long an owner may take to answer, in seconds.
    answer_s: ClassVar[float]
    #: The longest reply in bytes.
    max_reply_bytes: ClassVar[int]
    #: Raised by `_decode` for bytes that are no reply.
    malformed: ClassVar[type[Exception]]

    def __init__(self, address: str, on_revoked: Callable[[bytes], None]) -> None:
        """Connect.

        Args:
            address: the owner's, an abstract name.
            on_revoked: called with the key of a region that the owner took back.

        Raises:
            UnixPeerGone: no process listens there.
        """
        self.address = address
        self._on_revoked = on_revoked
        # One thread talks at a time.
        self._lock = threading.Lock()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(self.answer_s)
        try:
            self._socket.connect("\0" + address)
            #: The owner's process, when it began to listen.
            self._owner = PeerCredentials.of(self._socket)
        except OSError as error:
            self._socket.close()
            gone = UnixNotListening if isinstance(error, ConnectionRefusedError) else UnixPeerGone
            raise gone(f"no process listens at @{address}: {error}") from error
        self._socket.setblocking(False)
        #: Polled before and after each copy: much quicker than a `recv` that finds nothing.
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    @abstractmethod
    def _decode(self, message: bytes) -> Reply:
        """Return the reply in a message.

        Raises:
            Exception: `malformed`, if it is none.
        """

    @abstractmethod
    def _revoked_key(self, reply: Reply) -> bytes | None:
        """Return the key of the region that a message revokes; None for other messages."""

    @abstractmethod
    def _refusal(self, reply: Reply) -> tuple[bytes, AccessRefused] | None:
        """Return the key that a reply refuses, and why; None for other replies."""

    def require_alive(self) -> None:
        """Read what the owner sent meanwhile.

        Raises:
            UnixPeerGone: it hung up.
        """
        with self._lock:
            self._look()

    def _look(self) -> None:
        """Do what `require_alive` does; the caller holds the lock."""
        if self._closed:
            raise UnixPeerGone(f"the connection to @{self.address} is closed")
        if not self._readable.poll(0):
            return
        while (received := self._receive()) is not None:
            self._on_unasked(*received)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        self._closed = True
        self._socket.close()

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except OSError as error:
            raise UnixPeerGone(f"the owner at @{self.address} hung up: {error}") from error

    def _ask(
        self, message: bytes, key: bytes, is_answer: Callable[[Reply], bool], stop: StopSignal
    ) -> tuple[Reply, int | None]:
        """Send a request about a key and wait for its answer; the caller holds the lock.

        Returns:
            The answer, and the descriptor that came with it, which is the caller's to close.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """
        self._send(message)
        patience = min(self.answer_s, stop.remaining_s())
        waited = 0.0
        while waited <= patience and not stop.stopped:
            received = self._receive() if self._readable.poll(_POLL_S * 1000) else None
            if received is None:
                waited += _POLL_S
                continue
            reply, fd = received
            if is_answer(reply):
                return reply, fd
            self._on_unasked(reply, fd)
            refusal = self._refusal(reply)
            if refusal is not None and refusal[0] == key:
                raise refusal[1]
        # A late answer would be taken for that of a later request.
        self._hang_up()
        gone = UnixPeerGone if stop.stopped or stop.remaining_s() == 0.0 else UnixNotListening
        raise gone(f"the owner at @{self.address} did not answer in {patience:.2f} s")

    def _receive(self) -> tuple[Reply, int | None] | None:
        """Return one message with its descriptor; None when none is there (yet)."""
        try:
            message, fds, _, _ = socket.recv_fds(
                self._socket, self.max_reply_bytes + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise UnixPeerGone(f"the owner at @{self.address} hung up: {error}") from error
        fd = fds[0] if fds else None
        try:
            if not message:
                raise UnixPeerGone(f"the owner at @{self.address} hung up")
            return self._decode(message), fd
        except (self.malformed, UnixPeerGone) as error:
            if fd is not None:
                os.close(fd)
            raise UnixPeerGone(str(error)) from error

    def _on_unasked(self, reply: Reply, fd: int | None) -> None:
        """Act on a message that answers no request."""
        if fd is not None:
            os.close(fd)
        key = self._revoked_key(reply)
        if key is not None:
            self._on_revoked(key)
