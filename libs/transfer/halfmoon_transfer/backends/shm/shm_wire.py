"""What goes over the Unix socket: asking for a region's memory, and what is said about it.

A SOCK_SEQPACKET socket in the abstract namespace, so messages keep their borders and no file
is left behind. All are little-endian, and of 32 bytes but for `note` and `lent`:

    ask     peer to owner    4s "HMS1" | u32 0                          | u64 generation | 16s key
    note    peer to owner    4s "HMS1" | u32 1 | u64 generation | 16s id | MessagePack array of
                             sender and message (a notification; not over 8,192 bytes in all)
    borrow  peer to owner    4s "HMS1" | u32 2                          | u64 generation | 16s key
    return  peer to owner    4s "HMS1" | u32 3                          | u64 generation | 16s key
    notice  owner to peer    4s "HMS1" | u8 kind | u8 status | u16 0    | u64 number     | 16s key

    lent    owner to peer    4s "HMS1" | u8 5 | u8 0 | u16 writable     | u64 length     | 16s key
                             | u64 address

Kinds of notices: 1 granted (with the memfd as SCM_RIGHTS, `number` is its length), 2 refused
(`status` and `number` as in `regions.Status`), 3 revoked (the region is not registered any
more; unasked), 4 noted (the answer to a note, `key` is its id).

A region that is refused as not shareable may be borrowed instead: `lent` says where it is in the
owner's address space, and the owner takes nothing back until it was returned (which has no
answer) or the connection closes. A peer borrows for one batch at a time.

The connection stays open: when it closes, the owner is gone.
"""

import struct

import msgspec

from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.planning import transfer_plan
from halfmoon_transfer.regions.access import AccessStatus

MESSAGE_BYTES = 32
MAX_NOTIFICATION_FRAME_BYTES = 8192
_MAGIC = b"HMS1"
_ASK = struct.Struct("<4sIQ16s")
_NOTICE = struct.Struct("<4sBBHQ16s")

GRANTED, REFUSED, REVOKED, NOTED = 1, 2, 3, 4
_ASKING, _NOTING, _BORROWING, _RETURNING = 0, 1, 2, 3
_LENT = 5
_LENT_TAIL = struct.Struct("<Q")
LENT_REGION_BYTES = MESSAGE_BYTES + _LENT_TAIL.size
_STATUSES = frozenset(AccessStatus)


class ShmWireError(ValueError):
    """What came is not one of these messages."""


class ShmRegionRequest(msgspec.Struct, frozen=True):
    """May I map this region?"""

    generation: int
    key: bytes


class ShmBorrowRequest(ShmRegionRequest, frozen=True):
    """Where is this region, that can't be mapped?"""


class ShmReturn(ShmRegionRequest, frozen=True):
    """We touch this region no more, until it is borrowed again."""


class ShmNotification(msgspec.Struct, frozen=True):
    """A notification for the owner."""

    generation: int
    notice: transfer_plan.OutgoingNotification


class ShmReply(msgspec.Struct, frozen=True):
    """What the owner says about a region."""

    kind: int
    status: AccessStatus
    number: int
    key: bytes


class ShmLentRegion(msgspec.Struct, frozen=True):
    """Where a borrowed region is in the owner's memory."""

    key: bytes
    address: int
    length: int
    writable: bool


#: By how they are written.
_ASKS: dict[int, type[ShmRegionRequest]] = {
    _ASKING: ShmRegionRequest,
    _BORROWING: ShmBorrowRequest,
    _RETURNING: ShmReturn,
}
_KINDS = {kind: number for number, kind in _ASKS.items()}


def encode_request(ask: ShmRegionRequest) -> bytes:
    """The 32 bytes."""
    return _ASK.pack(_MAGIC, _KINDS[type(ask)], ask.generation, ask.key)


def encode_notification(note: ShmNotification) -> bytes:
    """The head and the words."""
    head = _ASK.pack(_MAGIC, _NOTING, note.generation, note.notice.id)
    return head + msgspec.msgpack.encode((note.notice.sender, note.notice.message))


def decode_request(message: bytes) -> ShmRegionRequest | ShmNotification:
    """Read what a peer asks.

    Raises:
        WireError: it is nothing that can be asked.
    """
    if len(message) < MESSAGE_BYTES or message[:4] != _MAGIC:
        raise ShmWireError(f"not a request for a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, generation, key = _ASK.unpack(message[:MESSAGE_BYTES])
    if kind in _ASKS and len(message) == MESSAGE_BYTES:
        return _ASKS[kind](generation, key)
    if kind != _NOTING or len(message) > MAX_NOTIFICATION_FRAME_BYTES:
        raise ShmWireError(f"a request of kind {kind}, {len(message)} bytes")
    try:
        words = msgspec.msgpack.decode(message[MESSAGE_BYTES:], type=tuple[str, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ShmWireError(f"not a note: {error}") from None
    if len(words[1]) > MAX_NOTIFICATION_BYTES:
        raise ShmWireError(f"a note of {len(words[1])} bytes, at most {MAX_NOTIFICATION_BYTES}")
    return ShmNotification(generation, transfer_plan.OutgoingNotification(key, *words))


def encode_reply(notice: ShmReply) -> bytes:
    """The 32 bytes."""
    return _NOTICE.pack(_MAGIC, notice.kind, notice.status, 0, notice.number, notice.key)


def encode_lent(lent: ShmLentRegion) -> bytes:
    """The 40 bytes."""
    head = _NOTICE.pack(_MAGIC, _LENT, AccessStatus.OK, lent.writable, lent.length, lent.key)
    return head + _LENT_TAIL.pack(lent.address)


def decode_reply(message: bytes) -> ShmReply | ShmLentRegion:
    """Read what an owner says.

    Raises:
        WireError: it is nothing that is said.
    """
    if len(message) == LENT_REGION_BYTES and message[:5] == _MAGIC + bytes([_LENT]):
        _, _, _, writable, length, key = _NOTICE.unpack(message[:MESSAGE_BYTES])
        (address,) = _LENT_TAIL.unpack(message[MESSAGE_BYTES:])
        return ShmLentRegion(key, address, length, bool(writable))
    if len(message) != MESSAGE_BYTES or message[:4] != _MAGIC:
        raise ShmWireError(f"not a notice about a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, status, _, number, key = _NOTICE.unpack(message)
    if kind not in (GRANTED, REFUSED, REVOKED, NOTED) or status not in _STATUSES:
        raise ShmWireError(f"a notice of kind {kind}, status {status}")
    return ShmReply(kind, AccessStatus(status), number, key)
