"""Read and write over one data connection, used by one thread at a time.

Version 1 does not acknowledge a write. The peer serves a connection's requests in order, so a
read of its last byte follows each write. When that byte arrives, the write was applied. When
the connection closes instead, the write was refused or lost, and is reported as such.
"""

import contextlib
import socket
from collections.abc import Sequence

from halfmoon_transfer.backends.mooncake import mooncake_frames
from halfmoon_transfer.backends.mooncake.mooncake_frames import FrameVersion, MooncakeRequest
from halfmoon_transfer.backends.mooncake.mooncake_records import BufferRecord
from halfmoon_transfer.backends.socket_io import (
    hang_up,
    receive,
    receive_into,
    send_all,
    tune_socket,
)


class AddressRefused(Exception):
    """The bytes are not in one registered buffer of the peer; the connection is used up."""


class MooncakeLane:
    """A data connection to one peer."""

    def __init__(self, sock: socket.socket, version: FrameVersion) -> None:
        self._socket = sock
        self._version: FrameVersion = version
        #: Buffers of a Halfmoon engine by key hash, valid while it serves this connection.
        self.buffers: dict[str, BufferRecord] = {}
        #: True once it has carried a batch: an idle connection may have died unnoticed.
        self.used = False

    def bind(self, epoch: int) -> None:
        """Bind the connection to an epoch of a Halfmoon engine.

        Raises:
            AddressRefused: the engine's epoch has changed.
            MooncakeFrameError: the answer is not valid.
            OSError: the connection broke.
        """
        send_all(self._socket, [mooncake_frames.encode_request(MooncakeRequest(False, epoch, 0))])
        self._read_status()

    def make_ready(self) -> None:
        """Remove the timeout of the socket; from now on only `abort` interrupts a wait."""
        self._socket.settimeout(None)
        tune_socket(self._socket)

    def write(self, address: int, data: Sequence[memoryview]) -> None:
        """Write these buffers to an address, one after the other; they are applied on return.

        Raises:
            AddressRefused: no buffer of the peer holds the range.
            MooncakeFrameError: the answer is not valid.
            OSError: the connection broke; over version 1 perhaps because of a refusal.
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
            # The peer may have refused before all was sent; then its status can be read.
            with contextlib.suppress(OSError):
                self._read_status()
            raise
        self._read_status()

    def read(self, address: int, data: Sequence[memoryview]) -> None:
        """Read from an address into these buffers, one after the other. Raises like `write`."""
        size = sum(map(len, data))
        send_all(
            self._socket,
            [mooncake_frames.encode_request(MooncakeRequest(False, address, size, self._version))],
        )
        if self._version == 2:
            self._read_status()
        receive_into(self._socket, data)

    def _read_status(self) -> None:
        code = mooncake_frames.decode_status(receive(self._socket, mooncake_frames.STATUS_BYTES))
        if code != mooncake_frames.APPLIED:
            raise AddressRefused(f"refused with code {code}")

    def abort(self) -> None:
        """Interrupt the thread that uses the lane; the lane can't be used afterwards."""
        hang_up(self._socket)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
