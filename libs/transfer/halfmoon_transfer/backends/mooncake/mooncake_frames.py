"""Encode and decode the frames of a Mooncake data port. Pure: bytes to values, and back.

All integers are little-endian. Requests on one connection are served one after the other.

    request    u64 size | u64 address | u8 op | 7 pad bytes                       24 bytes
    op         0 read, 1 write; with 0x80 added it is protocol version 2
    status     u64: 0x4D435456 ("MCTV") in the upper half, in the lower a code: 0 applied,
               1 the address is refused, and the connection is closed

               version 1                     version 2
    read       <- size bytes                 <- status, then size bytes
    write      -> size bytes, no answer      -> size bytes, <- status once they are applied

The address is a virtual address of the owner's process, and all `size` bytes must lie in one
registered buffer. Version 1 refuses by closing the connection without a status.
"""

import struct
from typing import Literal

import msgspec

HEADER_BYTES = 24
STATUS_BYTES = 8
APPLIED, REFUSED = 0, 1

_HEADER = struct.Struct("<QQB7x")
_STATUS = struct.Struct("<II")
_MAGIC = 0x4D435456
_READ, _WRITE, _VERSION_2 = 0, 1, 0x80

FrameVersion = Literal[1, 2]


class MooncakeFrameError(ValueError):
    """Received bytes violate the protocol; the connection can't be used any more."""


class MooncakeRequest(msgspec.Struct, frozen=True):
    """The header of a request, without the bytes of a write."""

    write: bool
    address: int
    size: int
    version: FrameVersion = 2


def encode_request(request: MooncakeRequest) -> bytes:
    """Encode a request header of 24 bytes."""
    op = _WRITE if request.write else _READ
    if request.version == 2:
        op |= _VERSION_2
    return _HEADER.pack(request.size, request.address, op)


def decode_request(header: bytes | memoryview) -> MooncakeRequest:
    """Decode a request header of 24 bytes; pad bytes are ignored.

    Raises:
        MooncakeFrameError: the operation is unknown.
    """
    size, address, op = _HEADER.unpack(header)
    if op & ~_VERSION_2 not in (_READ, _WRITE):
        raise MooncakeFrameError(
            f"operation {op:#04x}; there are 0 (read), 1 (write), and 0x80 added"
        )
    version: FrameVersion = 2 if op & _VERSION_2 else 1
    return MooncakeRequest(bool(op & _WRITE), address, size, version)


def encode_status(code: int) -> bytes:
    """Encode a status word of 8 bytes."""
    return _STATUS.pack(code, _MAGIC)


def decode_status(word: bytes | memoryview) -> int:
    """Decode a status word, and return its code.

    Raises:
        MooncakeFrameError: it is no status word.
    """
    code, magic = _STATUS.unpack(word)
    if magic != _MAGIC:
        raise MooncakeFrameError(
            f"{bytes(word).hex()} where a status word belongs: is it version 1?"
        )
    return int(code)
