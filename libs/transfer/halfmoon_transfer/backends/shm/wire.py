"""What goes over the Unix socket: asking for a region's memory, and what is said about it.

A SOCK_SEQPACKET socket in the abstract namespace, so messages keep their borders and no file
is left behind. All are 32 bytes, little-endian:

    ask     peer to owner    4s "HMS1" | u32 0                          | u64 generation | 16s key
    notice  owner to peer    4s "HMS1" | u8 kind | u8 status | u16 0    | u64 number     | 16s key

Kinds of notices: 1 granted (with the memfd as SCM_RIGHTS, `number` is its length), 2 refused
(`status` and `number` as in `regions.Status`), 3 revoked (the region is not registered any
more; unasked). The connection stays open: when it closes, the owner is gone.
"""

import struct

import msgspec

from halfmoon_transfer.regions import Status

MESSAGE_BYTES = 32
_MAGIC = b"HMS1"
_ASK = struct.Struct("<4sIQ16s")
_NOTICE = struct.Struct("<4sBBHQ16s")

GRANTED, REFUSED, REVOKED = 1, 2, 3
_STATUSES = frozenset(Status)


class WireError(ValueError):
    """What came is not one of these messages."""


class Ask(msgspec.Struct, frozen=True):
    """May I map this region?"""

    generation: int
    key: bytes


class Notice(msgspec.Struct, frozen=True):
    """What the owner says about a region."""

    kind: int
    status: Status
    number: int
    key: bytes


def encode_ask(ask: Ask) -> bytes:
    """The 32 bytes."""
    return _ASK.pack(_MAGIC, 0, ask.generation, ask.key)


def decode_ask(message: bytes) -> Ask:
    """Read an `Ask`.

    Raises:
        WireError: it is none.
    """
    if len(message) != MESSAGE_BYTES or message[:4] != _MAGIC:
        raise WireError(f"not a request for a region: {message[:8]!r}, {len(message)} bytes")
    _, _, generation, key = _ASK.unpack(message)
    return Ask(generation, key)


def encode_notice(notice: Notice) -> bytes:
    """The 32 bytes."""
    return _NOTICE.pack(_MAGIC, notice.kind, notice.status, 0, notice.number, notice.key)


def decode_notice(message: bytes) -> Notice:
    """Read a `Notice`.

    Raises:
        WireError: it is none.
    """
    if len(message) != MESSAGE_BYTES or message[:4] != _MAGIC:
        raise WireError(f"not a notice about a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, status, _, number, key = _NOTICE.unpack(message)
    if kind not in (GRANTED, REFUSED, REVOKED) or status not in _STATUSES:
        raise WireError(f"a notice of kind {kind}, status {status}")
    return Notice(kind, Status(status), number, key)
