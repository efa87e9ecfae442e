"""Ask an owner for its regions: to map them, or where they are in its memory."""

import fcntl
import logging
import mmap
import os
from collections.abc import Callable

from halfmoon_protocol.regions import KEY_BYTES
from halfmoon_transfer.backends.peer_credentials import WITHIN_ONE_USER
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
from halfmoon_transfer.backends.shm.write_mark import WriteMark
from halfmoon_transfer.backends.unix_peer import UnixPeer, UnixPeerGone
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.threads.stop_signal import StopSignal

_log = logging.getLogger(__name__)


class PeerOfOtherUser(Exception):
    """An owner that must not see our memory, and whose messages are not trusted."""


class ShmPeer(UnixPeer[ShmReply | ShmLentRegion]):
    """One connection to one start of one owner."""

    #: The owner only looks into a table.
    answer_s = 2.0
    max_reply_bytes = LENT_REGION_BYTES
    malformed = ShmWireError

    def __init__(
        self, address: str, on_revoked: Callable[[bytes], None], *, our_user_only: bool
    ) -> None:
        """Connect.

        Raises:
            UnixPeerGone: no process listens there.
            PeerOfOtherUser: a process of another user listens there, and that matters.
        """
        super().__init__(address, on_revoked)
        #: Copies into its memory that go on: the connection is closed after the last of them.
        self._n_copies = 0
        #: The owner's process; None when its memory can't be reached, and before the first try.
        self._process: RemoteProcess | None = None
        self._tried = False
        if our_user_only and not self._owner.is_our_user:
            self.close()
            raise PeerOfOtherUser(f"the owner runs as user {self._owner.user}; {WITHIN_ONE_USER}")
        try:
            self._mark = WriteMark(self._socket, encode_request(ShmReturn(0, bytes(KEY_BYTES))))
        except OSError as error:
            self.close()
            raise UnixPeerGone(f"the owner at @{address} got no write mark: {error}") from error

    def _decode(self, message: bytes) -> ShmReply | ShmLentRegion:
        return decode_reply(message)

    def _revoked_key(self, reply: ShmReply | ShmLentRegion) -> bytes | None:
        return reply.key if isinstance(reply, ShmReply) and reply.kind == REVOKED else None

    def _refusal(self, reply: ShmReply | ShmLentRegion) -> tuple[bytes, AccessRefused] | None:
        if isinstance(reply, ShmReply) and reply.kind == REFUSED:
            return reply.key, AccessRefused(reply.status, reply.number)
        return None

    def map(self, generation: int, key: bytes, stop: StopSignal) -> memoryview:
        """Request a region and map it.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """
        request = encode_request(ShmRegionRequest(generation, key))
        with self._lock:
            reply, fd = self._ask(request, key, lambda each: _is_reply(each, GRANTED, key), stop)
        assert isinstance(reply, ShmReply)
        if fd is None:
            raise UnixPeerGone(f"the owner at @{self.address} granted a region without its memory")
        try:
            return map_shared(fd, reply.number)
        finally:
            os.close(fd)

    def begin_copy(self) -> None:
        """Show the owner that its memory is written to, until `end_copy`, which must follow.

        Raises:
            UnixPeerGone: it has cut us off, or hung up. Nothing may be written.
        """
        with self._lock:
            self._n_copies += 1
            self._mark.show(self._n_copies)
            self._look()

    def end_copy(self) -> None:
        """Show the owner that a copy is over."""
        with self._lock:
            self._n_copies -= 1
            self._mark.show(self._n_copies)
            if self._closed and self._n_copies == 0:
                self._hang_up()

    def process(self) -> RemoteProcess | None:
        """Return the owner's process, to reach into its memory; None when that is not allowed.

        Raises:
            UnixPeerGone: it has ended.
        """
        with self._lock:
            if not self._tried:
                self._tried = True
                try:
                    self._process = RemoteProcess(self._owner.pid)
                except ProcessVmDenied as error:
                    _log.debug("memory of @%s goes over the wire: %s", self.address, error)
                except ProcessGone as gone:
                    raise UnixPeerGone(str(gone)) from gone
            process = self._process
        # Only now: the number was the owner's when it began to listen.
        self.require_alive()
        return process

    def give_up_process(self, reason: str) -> None:
        """Stop reaching into the owner's memory: the kernel does not allow it."""
        _log.debug("memory of @%s goes over the wire: %s", self.address, reason)
        with self._lock:
            self._process = None

    def borrow(self, generation: int, key: bytes, stop: StopSignal) -> ShmLentRegion:
        """Ask where a region is in the owner's memory; call `give_back` after the batch.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """
        request = encode_request(ShmBorrowRequest(generation, key))
        with self._lock:
            lent, fd = self._ask(
                request,
                key,
                lambda each: isinstance(each, ShmLentRegion) and each.key == key,
                stop,
            )
        if fd is not None:
            os.close(fd)
        assert isinstance(lent, ShmLentRegion)
        return lent

    def give_back(self, generation: int, key: bytes) -> None:
        """Return a borrowed region; there is no answer, and an owner may be gone."""
        with self._lock:
            try:
                self._send(encode_request(ShmReturn(generation, key)))
            except UnixPeerGone:
                # The owner gets all regions back when the connection ends.
                self._hang_up()

    def notify(self, message: ShmNotification, stop: StopSignal) -> None:
        """Deliver a notification.

        Raises:
            AccessRefused: the owner refuses.
            UnixPeerGone: it hung up, sent nonsense, or did not answer.
        """
        key = message.notification.id
        with self._lock:
            reply, fd = self._ask(
                encode_notification(message), key, lambda each: _is_reply(each, NOTED, key), stop
            )
        if fd is not None:
            os.close(fd)
        assert isinstance(reply, ShmReply)
        if reply.status is not AccessStatus.OK:
            raise AccessRefused(reply.status, reply.number)

    def _hang_up(self) -> None:
        self._closed = True
        if self._n_copies:
            return  # the owner takes us for gone when the connection closes
        super()._hang_up()
        if self._process is not None:
            self._process.close()
            self._process = None


def _is_reply(reply: ShmReply | ShmLentRegion, kind: int, key: bytes) -> bool:
    return isinstance(reply, ShmReply) and reply.kind == kind and reply.key == key


def map_shared(fd: int, length: int) -> memoryview:
    """Map an owner's memory, if it is sealed against truncation.

    Raises:
        UnixPeerGone: it is not sealed, too short, or can't be mapped.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size < length:
            raise UnixPeerGone("the owner's memory could be cut short under us: not mapped")
        return memoryview(mmap.mmap(fd, length))
    except (OSError, ValueError) as error:
        raise UnixPeerGone(
            f"the owner's memory of {length} bytes can't be mapped: {error}"
        ) from error
