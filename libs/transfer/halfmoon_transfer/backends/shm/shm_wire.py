"""Encode and decode the messages of the shm backend on its Unix socket.

It is a SOCK_SEQPACKET socket in the abstract namespace: messages keep their borders, and no file is
left behind. All are little-endian, and have 32 bytes except `note` and `lent`:

    ask     peer to owner    4s "HMS1" | u32 0                          | u64 generation | 16s key
    note    peer to owner    4s "HMS1" | u32 1 | u64 generation | 16s id | MessagePack array of
                             sender and message (a notification; not over 8,192 bytes in all)
    borrow  peer to owner    4s "HMS1" | u32 2                          | u64 generation | 16s key
    return  peer to owner    4s "HMS1" | u32 3                          | u64 generation | 16s key
    notice  owner to peer    4s "HMS1" | u8 kind | u8 status | u16 0    | u64 number     | 16s key

    lent    owner to peer    4s "HMS1" | u8 5 | u8 0 | u16 writable     | u64 length     | 16s key
                             | u64 address

Kinds of notices:

    1  granted  the memfd follows as SCM_RIGHTS; `number` is its length
    2  refused  `status` is an `AccessStatus`, `number` its detail
    3  revoked  the region is not registered any more; sent without a request
    4  noted    the answer to a note; `key` is its id

A connection begins with a `return` of a key of zeros, which answers nothing and carries the peer's
write mark as SCM_RIGHTS (`write_mark`). An owner that cuts a peer off sends nothing more, and reads
on until the peer hangs up.

A region that is refused as not shareable may be borrowed instead. `lent` has its address in the
owner's memory. The owner frees no borrowed region until it was returned (which has no answer) or
the connection closes. A peer borrows for one batch at a time.

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
_REQUEST = struct.Struct("<4sIQ16s")
_REPLY = struct.Struct("<4sBBHQ16s")

GRANTED, REFUSED, REVOKED, NOTED = 1, 2, 3, 4
_MAP, _NOTIFY, _BORROW, _RETURN = 0, 1, 2, 3
_LENT = 5
_LENT_TAIL = struct.Struct("<Q")
LENT_REGION_BYTES = MESSAGE_BYTES + _LENT_TAIL.size
_STATUSES = frozenset(AccessStatus)


class ShmWireError(ValueError):
    """Bytes that are none of these messages."""


class ShmRegionRequest(msgspec.Struct, frozen=True):
    """A request to map a region."""

    generation: int
    key: bytes


class ShmBorrowRequest(ShmRegionRequest, frozen=True):
    """A request for the address of a region that can't be mapped."""


class ShmReturn(ShmRegionRequest, frozen=True):
    """The end of the use of a borrowed region."""


class ShmNotification(msgspec.Struct, frozen=True):
    """A notification for the owner."""

    generation: int
    notification: transfer_plan.OutgoingNotification


class ShmReply(msgspec.Struct, frozen=True):
    """An owner's message about a region."""

    kind: int
    status: AccessStatus
    number: int
    key: bytes


class ShmLentRegion(msgspec.Struct, frozen=True):
    """The address of a borrowed region in the owner's memory."""

    key: bytes
    address: int
    length: int
    writable: bool


#: Requests by their number on the wire.
_REQUESTS: dict[int, type[ShmRegionRequest]] = {
    _MAP: ShmRegionRequest,
    _BORROW: ShmBorrowRequest,
    _RETURN: ShmReturn,
}
_KINDS = {kind: number for number, kind in _REQUESTS.items()}


def encode_request(request: ShmRegionRequest) -> bytes:
    """Encode a request, in 32 bytes."""
    return _REQUEST.pack(_MAGIC, _KINDS[type(request)], request.generation, request.key)


def encode_notification(message: ShmNotification) -> bytes:
    """Encode a notification."""
    head = _REQUEST.pack(_MAGIC, _NOTIFY, message.generation, message.notification.id)
    return head + msgspec.msgpack.encode(
        (message.notification.sender, message.notification.message)
    )


def decode_request(message: bytes) -> ShmRegionRequest | ShmNotification:
    """Decode a peer's request.

    Raises:
        ShmWireError: it is no request.
    """
    if len(message) < MESSAGE_BYTES or message[:4] != _MAGIC:
        raise ShmWireError(f"not a request for a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, generation, key = _REQUEST.unpack(message[:MESSAGE_BYTES])
    if kind in _REQUESTS and len(message) == MESSAGE_BYTES:
        return _REQUESTS[kind](generation, key)
    if kind != _NOTIFY or len(message) > MAX_NOTIFICATION_FRAME_BYTES:
        raise ShmWireError(f"a request of kind {kind}, {len(message)} bytes")
    try:
        words = msgspec.msgpack.decode(message[MESSAGE_BYTES:], type=tuple[str, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ShmWireError(f"not a note: {error}") from None
    if len(words[1]) > MAX_NOTIFICATION_BYTES:
        raise ShmWireError(f"a note of {len(words[1])} bytes, at most {MAX_NOTIFICATION_BYTES}")
    return ShmNotification(generation, transfer_plan.OutgoingNotification(key, *words))


def encode_reply(reply: ShmReply) -> bytes:
    """Encode a reply, in 32 bytes."""
    return _REPLY.pack(_MAGIC, reply.kind, reply.status, 0, reply.number, reply.key)


def encode_lent(lent: ShmLentRegion) -> bytes:
    """Encode a lent region, in 40 bytes."""
    head = _REPLY.pack(_MAGIC, _LENT, AccessStatus.OK, lent.writable, lent.length, lent.key)
    return head + _LENT_TAIL.pack(lent.address)


def decode_reply(message: bytes) -> ShmReply | ShmLentRegion:
    """Decode an owner's message.

    Raises:
        ShmWireError: it is no such message.
    """
    if len(message) == LENT_REGION_BYTES and message[:5] == _MAGIC + bytes([_LENT]):
        _, _, _, writable, length, key = _REPLY.unpack(message[:MESSAGE_BYTES])
        (address,) = _LENT_TAIL.unpack(message[MESSAGE_BYTES:])
        return ShmLentRegion(key, address, length, bool(writable))
    if len(message) != MESSAGE_BYTES or message[:4] != _MAGIC:
        raise ShmWireError(f"not a notice about a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, status, _, number, key = _REPLY.unpack(message)
    if kind not in (GRANTED, REFUSED, REVOKED, NOTED) or status not in _STATUSES:
        raise ShmWireError(f"a notice of kind {kind}, status {status}")
    return ShmReply(kind, AccessStatus(status), number, key)
