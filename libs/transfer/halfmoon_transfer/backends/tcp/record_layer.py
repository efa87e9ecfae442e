"""Encrypt a connection: seal what is sent into records, and open those that arrive.

    record   u32 n (little-endian) | n bytes of ciphertext | 16 bytes of tag        1 ≤ n ≤ 65,536
             AES-256-GCM with the key of its direction (`record_keys`); the 4 bytes of the length
             are authenticated with it. The nonce is 4 zero bytes and a u64 (little-endian): the
             number of records sent before it in this direction

Records know nothing of frames: a record may hold several, and a frame may go on in the next one.
A record that was changed, repeated, dropped or put elsewhere fails to open. The connection ends
then, and no byte of that record has been handed on.

The layer is written twice, here and in C (`halfmoon_transfer_native.Records`). The extension's is
used where it finds OpenSSL's libcrypto, since its loops can go on with encrypted connections.
"""

import errno
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from halfmoon_transfer.backends.socket_io import SocketClosed
from halfmoon_transfer.backends.tcp import native

RECORD_BYTES = 64 * 1024
TAG_BYTES = 16
#: Records after which a connection is replaced: at most 64 GiB are sealed with one key, with
#: which the tags and the secrecy of AES-GCM are far from their limits.
MAX_RECORDS = 1 << 20
#: Records that a key seals at most; a batch that began before `MAX_RECORDS` still ends.
_LAST_RECORD = 2 * MAX_RECORDS
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<4xQ")
_SEALED_BYTES = _LENGTH.size + RECORD_BYTES + TAG_BYTES


class EncryptedSocket(ABC):
    """A socket whose bytes travel in records; one thread uses it at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @property
    @abstractmethod
    def spent(self) -> bool:
        """Return whether its keys have sealed so much that the connection should be replaced."""

    @abstractmethod
    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Seal and send all of these.

        Raises:
            OSError: the connection broke, or its key is used up.
        """

    @abstractmethod
    def _receive(self, buffer: memoryview) -> int:
        """Receive some bytes; return 0 when the peer has hung up after a whole record.

        Raises:
            SocketClosed: the peer hung up in the middle of a record.
            BlockingIOError: the socket's timeout passed between records.
            OSError: the connection broke, or a record is not as its sender sealed it.
        """

    # What `socket_io` uses of a socket.

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send all of these; return the number of their bytes."""
        self._send(buffers)
        return sum(len(each) for each in buffers)

    def recv_into(self, buffer: memoryview, _n_bytes: int = 0, _flags: int = 0) -> int:
        """Receive some bytes, whatever the flags."""
        return self._receive(buffer)

    def recvmsg_into(
        self, buffers: Iterable[memoryview], _n_ancillary: int = 0, _flags: int = 0
    ) -> tuple[int, None]:
        """Receive some bytes into the first buffer that has room."""
        return self._receive(next(each for each in buffers if len(each))), None

    def setblocking(self, flag: bool) -> None:
        """Set whether to wait for the peer."""
        self._socket.setblocking(flag)

    def shutdown(self, how: int) -> None:
        """Shut the connection down."""
        self._socket.shutdown(how)

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PythonEncryptedSocket(EncryptedSocket):
    """Encrypts by the package `cryptography`."""

    def __init__(self, sock: socket.socket, sending_key: bytes, receiving_key: bytes) -> None:
        super().__init__(sock)
        self._sealing, self._opening = AESGCM(sending_key), AESGCM(receiving_key)
        self._n_sealed = self._n_opened = 0
        self._outgoing = memoryview(bytearray(_SEALED_BYTES))
        #: Bytes as they arrived, not opened yet: `_arrived[_first:_last]`.
        self._arrived = memoryview(bytearray(2 * _SEALED_BYTES))
        self._first = self._last = 0
        #: The record opened last, and how much of it was handed on.
        self._opened = memoryview(b"")
        self._n_taken = 0

    @property
    def spent(self) -> bool:
        """Return whether its keys have sealed so much that the connection should be replaced."""
        return max(self._n_sealed, self._n_opened) >= MAX_RECORDS

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        part: list[bytes | memoryview] = []
        room = RECORD_BYTES
        for each in buffers:
            left = memoryview(each)
            while len(left):
                part.append(left[:room])
                left = left[len(part[-1]) :]
                room -= len(part[-1])
                if room == 0:
                    self._send_record(part)
                    part, room = [], RECORD_BYTES
        if part:
            self._send_record(part)

    def _send_record(self, part: list[bytes | memoryview]) -> None:
        if self._n_sealed >= _LAST_RECORD:
            raise OSError(errno.EKEYEXPIRED, f"{self._n_sealed} records, the limit of one key")
        plain = part[0] if len(part) == 1 else b"".join(part)
        n_plain = len(plain)
        record = self._outgoing[: _LENGTH.size + n_plain + TAG_BYTES]
        _LENGTH.pack_into(record, 0, n_plain)
        nonce = _NONCE.pack(self._n_sealed)
        # Counted first: a nonce is never used again, whatever happens.
        self._n_sealed += 1
        self._sealing.encrypt_into(nonce, plain, record[: _LENGTH.size], record[_LENGTH.size :])
        self._socket.sendall(record)

    def _receive(self, buffer: memoryview) -> int:
        if self._n_taken == len(self._opened) and not self._open_next():
            return 0
        taken = self._opened[self._n_taken : self._n_taken + len(buffer)]
        buffer[: len(taken)] = taken
        self._n_taken += len(taken)
        return len(taken)

    def _open_next(self) -> bool:
        """Open the next record; return False when the peer has hung up before it."""
        while (record := self._whole_record()) is None:
            if not self._read_more():
                return False
        nonce = _NONCE.pack(self._n_opened)
        header, sealed = record[: _LENGTH.size], record[_LENGTH.size :]
        try:
            opened = self._opening.decrypt(nonce, sealed, header)
        except InvalidTag:
            raise broken_seal(self._n_opened) from None
        self._first += len(record)
        self._n_opened += 1
        self._opened, self._n_taken = memoryview(opened), 0
        return True

    def _whole_record(self) -> memoryview | None:
        """Return the next record, still sealed; None while it has not arrived."""
        arrived = self._arrived[self._first : self._last]
        if len(arrived) < _LENGTH.size:
            return None
        (n_plain,) = _LENGTH.unpack_from(arrived)
        if not 1 <= n_plain <= RECORD_BYTES:
            raise broken_seal(self._n_opened)
        n_record = _LENGTH.size + n_plain + TAG_BYTES
        return arrived[:n_record] if len(arrived) >= n_record else None

    def _read_more(self) -> bool:
        """Read what has arrived; return False when the peer has hung up between records."""
        n_left = self._last - self._first
        if self._first:
            self._arrived[:n_left] = bytes(self._arrived[self._first : self._last])
            self._first, self._last = 0, n_left
        try:
            n_received = self._socket.recv_into(self._arrived[n_left:])
        except BlockingIOError:
            if n_left:
                raise TimeoutError("the peer stalled in the middle of a record") from None
            raise
        if n_received == 0 and n_left:
            raise SocketClosed(clean=False)
        self._last += n_received
        return n_received > 0


class NativeEncryptedSocket(EncryptedSocket):
    """Encrypts in the extension, whose loops can use its `records`."""

    def __init__(self, sock: socket.socket, sending_key: bytes, receiving_key: bytes) -> None:
        super().__init__(sock)
        self.records = native.open_records(sending_key, receiving_key, _LAST_RECORD)

    @property
    def spent(self) -> bool:
        """Return whether its keys have sealed so much that the connection should be replaced."""
        return max(self.records.counts) >= MAX_RECORDS

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        self.records.send(self._socket.fileno(), tuple(buffers))

    def _receive(self, buffer: memoryview) -> int:
        return self.records.receive(self._socket.fileno(), buffer)


def encrypt_socket(
    sock: socket.socket, sending_key: bytes, receiving_key: bytes, *, use_native: bool
) -> EncryptedSocket:
    """Encrypt what follows on a connection, by the extension if wanted and possible."""
    kind = NativeEncryptedSocket if use_native and native.can_encrypt() else PythonEncryptedSocket
    return kind(sock, sending_key, receiving_key)


def broken_seal(number: int) -> OSError:
    """Return the error for a record that does not open; the extension's says the same."""
    return OSError(
        errno.EBADMSG,
        f"encrypted record {number} is not as its sender sealed it: "
        "changed, repeated or lost in transit",
    )
