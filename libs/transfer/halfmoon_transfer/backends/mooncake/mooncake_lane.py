"""Our side as an initiator: one data connection, used by one thread at a time.

Version 1 does not acknowledge a write. As a connection's requests are served one after the
other, each write is followed by a read of its last byte: when that byte is here, the write was
applied; when the connection closes instead, it was refused or lost, and is reported so.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from functools import partial

from halfmoon_transfer.backends.mooncake import mooncake_frames
from halfmoon_transfer.backends.mooncake.mooncake_frames import FrameVersion, MooncakeRequest
from halfmoon_transfer.backends.mooncake.mooncake_records import BufferRecord
from halfmoon_transfer.backends.socket_io import receive, receive_into, send_all, tune_socket
from halfmoon_transfer.threads.stop_signal import StopSignal


class AddressRefused(Exception):
    """The bytes don't lie in one registered buffer of the peer; the connection is of no use."""


def dial(host: str, port: int, timeout_s: float, stop: StopSignal) -> socket.socket:
    """Connect to the host's addresses in turn; the socket keeps the patience that is left.

    Raises:
        OSError: none of them answers.
    """
    until = time.monotonic() + min(timeout_s, stop.remaining_s())
    error: OSError = ConnectionError(f"{host!r} has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise ConnectionError(f"{host!r:.200} is no host name") from None
    for family, kind, protocol, _, address in found:
        left = until - time.monotonic()
        if left <= 0 or stop.stopped:
            error = TimeoutError("no time is left")
            break
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(left)
        try:
            with stop.calling_on_stop(partial(_kick, sock)):
                sock.connect(address)
        except OSError as failed:
            sock.close()
            error = failed
        else:
            return sock
    raise error


class MooncakeLane:
    """A data connection."""

    def __init__(self, sock: socket.socket, version: FrameVersion) -> None:
        self._socket = sock
        self._version: FrameVersion = version
        #: To one of our own engines: its buffers by key hash, true for as long as it serves us.
        self.buffers: dict[str, BufferRecord] = {}
        #: Whether it has carried anything: an idle connection may have died unnoticed.
        self.used = False

    def bind(self, epoch: int) -> None:
        """Ask one of our own engines whether this is still its epoch.

        Raises:
            AddressRefused: it is not.
            FrameError, OSError: as ever.
        """
        send_all(self._socket, [mooncake_frames.encode_request(MooncakeRequest(False, epoch, 0))])
        self._status()

    def ready(self) -> None:
        """From now on it waits as long as it must; `abort` wakes it."""
        self._socket.settimeout(None)
        tune_socket(self._socket)

    def write(self, address: int, data: Sequence[memoryview]) -> None:
        """Put these bytes there, one after the other; they are applied when it returns.

        Raises:
            AddressRefused: the peer has no such place.
            FrameError: the peer answered nonsense.
            OSError: the connection broke; over version 1 perhaps because it was refused.
        """
        size = sum(map(len, data))
        head = mooncake_frames.encode_request(MooncakeRequest(True, address, size, self._version))
        if self._version == 1:
            check = mooncake_frames.encode_request(MooncakeRequest(False, address + size - 1, 1, 1))
            send_all(self._socket, [head, *data, check])
            receive(self._socket, 1)
            return
        try:
            send_all(self._socket, [head, *data])
        except OSError:
            # Perhaps it was refused before all was sent; then the reason is there to read.
            with contextlib.suppress(OSError):
                self._status()
            raise
        self._status()

    def read(self, address: int, data: Sequence[memoryview]) -> None:
        """Fill these buffers, one after the other, from there. Raises like `write`."""
        size = sum(map(len, data))
        send_all(
            self._socket,
            [mooncake_frames.encode_request(MooncakeRequest(False, address, size, self._version))],
        )
        if self._version == 2:
            self._status()
        receive_into(self._socket, data)

    def _status(self) -> None:
        code = mooncake_frames.decode_status(receive(self._socket, mooncake_frames.STATUS_BYTES))
        if code != mooncake_frames.APPLIED:
            raise AddressRefused(f"refused with code {code}")

    def abort(self) -> None:
        """Wake the thread that uses it, from another one; the lane is of no use afterwards."""
        _kick(self._socket)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _kick(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
