"""The asking side: one connection to an owner, and what it said about its regions.

The connection is the proof of life. It is looked at before and after each use of mapped
memory: once it has closed, the memory is nobody's, and what was done to it counts as lost.
"""

import fcntl
import logging
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable

from halfmoon_transfer.backends.peer_credentials import WITHIN_ONE_USER, PeerCredentials
from halfmoon_transfer.backends.shm.process_vm import ProcessGone, ProcessVmDenied, RemoteProcess
from halfmoon_transfer.backends.shm.shm_wire import (
    GRANTED,
    LENT_REGION_BYTES,
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
    decode_reply,
    encode_notification,
    encode_request,
)
from halfmoon_transfer.planning.transfer_plan import OutcomeKind
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.threads.stop_signal import StopSignal

_log = logging.getLogger(__name__)
#: How long an owner may take to answer: it only looks into a table.
_ANSWER_S = 2.0
_POLL_S = 0.05


class ShmPeerGone(Exception):
    """The owner can't be reached, hung up, or makes no sense; the text says which."""

    fate = OutcomeKind.LOST


class ShmNotListening(ShmPeerGone):
    """The owner does not listen, or listens and does not answer: no other try will change that."""

    fate = OutcomeKind.UNREACHABLE


class PeerOfOtherUser(Exception):
    """The owner is not to be trusted with our memory, nor with what it sends."""


class ShmPeer:
    """One connection to one start of one owner."""

    def __init__(
        self, address: str, on_revoked: Callable[[bytes], None], *, our_user_only: bool
    ) -> None:
        """Connect.

        Raises:
            PeerGone: no process listens there.
            AnotherUser: somebody of another user does, and that matters.
        """
        self.address = address
        #: The owner's process; None when its memory can't be reached, and not before it was tried.
        self._process: RemoteProcess | None = None
        self._tried = False
        self._on_revoked = on_revoked
        # One thread talks at a time.
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        try:
            self._socket.connect("\0" + address)
            them = PeerCredentials.of(self._socket)
        except OSError as error:
            self._socket.close()
            gone = ShmNotListening if isinstance(error, ConnectionRefusedError) else ShmPeerGone
            raise gone(f"no process listens at @{address}: {error}") from error
        if our_user_only and not them.is_our_user:
            self._socket.close()
            raise PeerOfOtherUser(f"the owner runs as user {them.user}; {WITHIN_ONE_USER}")
        self._pid = them.pid
        self._socket.setblocking(False)
        #: Asked before and after each copy: much quicker than a `recv` that finds nothing.
        self._news = select.poll()
        self._news.register(self._socket, select.POLLIN)

    def require_alive(self) -> None:
        """Read what the owner said meanwhile.

        Raises:
            PeerGone: it hung up.
        """
        with self._lock:
            if not self._news.poll(0):
                return
            while (notice := self._receive(block=False)) is not None:
                self._heed(*notice)

    def map(self, generation: int, key: bytes, stop: StopSignal) -> memoryview:
        """Ask for a region and map it.

        Raises:
            Refused: the owner says no.
            PeerGone: it says nothing, or nothing that makes sense.
        """
        with self._lock:
            self._send(encode_request(ShmRegionRequest(generation, key)))
            notice, fd = self._await_answer(GRANTED, key, stop)
        assert isinstance(notice, ShmReply)
        if fd is None:
            raise ShmPeerGone(f"the owner at @{self.address} granted a region without its memory")
        try:
            return map_shared(fd, notice.number)
        finally:
            os.close(fd)

    def process(self) -> RemoteProcess | None:
        """The owner's process, to reach into its memory; None when that is not allowed.

        Raises:
            PeerGone: it has ended.
        """
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._process = RemoteProcess(self._pid)
                except ProcessVmDenied as error:
                    _log.debug("memory of @%s goes over the wire: %s", self.address, error)
                except ProcessGone as gone:
                    raise ShmPeerGone(str(gone)) from gone
            process = self._process
        # Only now: the number was the owner's when it began to listen.
        self.require_alive()
        return process

    def give_up_process(self, reason: str) -> None:
        """The kernel does not let us: do not try again."""
        _log.debug("memory of @%s goes over the wire: %s", self.address, reason)
        with self._lock:
            self._process = None

    def borrow(self, generation: int, key: bytes, stop: StopSignal) -> ShmLentRegion:
        """Ask where a region is in the owner's memory; `give_back` it soon.

        Raises:
            Refused: the owner says no.
            PeerGone: it says nothing, or nothing that makes sense.
        """
        with self._lock:
            self._send(encode_request(ShmBorrowRequest(generation, key)))
            lent, fd = self._await_answer(ShmLentRegion, key, stop)
        if fd is not None:
            os.close(fd)
        assert isinstance(lent, ShmLentRegion)
        return lent

    def give_back(self, generation: int, key: bytes) -> None:
        """We touch it no more. Nobody answers; to an owner that is gone it means nothing."""
        with self._lock:
            try:
                self._send(encode_request(ShmReturn(generation, key)))
            except ShmPeerGone:
                # It gets all back with the connection's end.
                self._socket.close()

    def notify(self, note: ShmNotification, stop: StopSignal) -> None:
        """Deliver a notification.

        Raises:
            Refused: the owner says no.
            PeerGone: it says nothing, or nothing that makes sense.
        """
        with self._lock:
            self._send(encode_notification(note))
            notice, fd = self._await_answer(NOTED, note.notice.id, stop)
        if fd is not None:
            os.close(fd)
        assert isinstance(notice, ShmReply)
        if notice.status is not AccessStatus.OK:
            raise AccessRefused(notice.status, notice.number)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._socket.close()
            if self._process is not None:
                self._process.close()
                self._process = None

    def _send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except OSError as error:
            raise ShmPeerGone(f"the owner at @{self.address} hung up: {error}") from error

    def _await_answer(
        self, kind: int | type[ShmLentRegion], key: bytes, stop: StopSignal
    ) -> tuple[ShmReply | ShmLentRegion, int | None]:
        """The notice of this kind about this key, and the descriptor that came with it."""
        patience = min(_ANSWER_S, stop.remaining_s())
        waited = 0.0
        while waited <= patience and not stop.stopped:
            received = self._receive(block=True)
            if received is None:
                waited += _POLL_S
                continue
            notice, fd = received
            of_kind = (
                kind is ShmLentRegion if isinstance(notice, ShmLentRegion) else notice.kind == kind
            )
            if of_kind and notice.key == key:
                return notice, fd
            self._heed(notice, fd)
            if isinstance(notice, ShmReply) and notice.kind == REFUSED and notice.key == key:
                raise AccessRefused(notice.status, notice.number)
        # An answer that comes after this would be taken for that of a later question.
        self._socket.close()
        gone = ShmPeerGone if stop.stopped or stop.remaining_s() == 0.0 else ShmNotListening
        raise gone(f"the owner at @{self.address} did not answer in {patience:.2f} s")

    def _receive(self, *, block: bool) -> tuple[ShmReply | ShmLentRegion, int | None] | None:
        """One notice with its descriptor; None when none is there (yet)."""
        try:
            if block and not _readable(self._socket):
                return None
            message, fds, _, _ = socket.recv_fds(
                self._socket, LENT_REGION_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise ShmPeerGone(f"the owner at @{self.address} hung up: {error}") from error
        fd = fds[0] if fds else None
        try:
            if not message:
                raise ShmPeerGone(f"the owner at @{self.address} hung up")
            return decode_reply(message), fd
        except (ShmWireError, ShmPeerGone) as error:
            if fd is not None:
                os.close(fd)
            raise ShmPeerGone(str(error)) from error

    def _heed(self, notice: ShmReply | ShmLentRegion, fd: int | None) -> None:
        """Act on a notice that nobody waits for."""
        if fd is not None:
            os.close(fd)
        if isinstance(notice, ShmReply) and notice.kind == REVOKED:
            self._on_revoked(notice.key)


def _readable(sock: socket.socket) -> bool:
    """Wait a moment for something to read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(_POLL_S * 1000))


def map_shared(fd: int, length: int) -> memoryview:
    """Map an owner's memory, if that can't hurt us later."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size < length:
            raise ShmPeerGone("the owner's memory could be cut short under us: not mapped")
        return memoryview(mmap.mmap(fd, length))
    except (OSError, ValueError) as error:
        raise ShmPeerGone(
            f"the owner's memory of {length} bytes can't be mapped: {error}"
        ) from error
