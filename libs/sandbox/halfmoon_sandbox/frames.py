"""Bytes between a process and its children: length-prefixed frames over a socket pair.

request  = u32 length | f64 processor seconds allowed | payload
response = u32 length | u8 status | f64 processor seconds used | payload
"""

import socket
import struct

#: The largest frame: a chat of a million tokens fits, in either direction.
MAX_FRAME_BYTES = 256 * 1024 * 1024
LENGTH_FORMAT = struct.Struct("<I")
REQUEST = struct.Struct("<d")
RESPONSE = struct.Struct("<Bd")

OK, FAILED = 0, 1


def encode_frame(*parts: bytes) -> bytes:
    """Join parts to one frame.

    Raises:
        ValueError: over `MAX_FRAME_BYTES`.
    """
    n_bytes = sum(map(len, parts))
    if n_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {n_bytes} bytes is over {MAX_FRAME_BYTES}")
    return b"".join((LENGTH_FORMAT.pack(n_bytes), *parts))


def receive_frame(connection: socket.socket) -> bytes | None:
    """Read one frame from a blocking socket; None when the other end has closed.

    Raises:
        ValueError: over `MAX_FRAME_BYTES`.
    """
    head = receive_exactly(connection, LENGTH_FORMAT.size)
    if head is None:
        return None
    (n_bytes,) = LENGTH_FORMAT.unpack(head)
    if n_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {n_bytes} bytes is over {MAX_FRAME_BYTES}")
    return receive_exactly(connection, n_bytes)


def receive_exactly(connection: socket.socket, n_bytes: int) -> bytes | None:
    """Read so many bytes from a blocking socket; None when the other end closes before."""
    buffer = bytearray(n_bytes)
    view = memoryview(buffer)
    while view:
        n_read = connection.recv_into(view)
        if n_read == 0:
            return None
        view = view[n_read:]
    return bytes(buffer)
