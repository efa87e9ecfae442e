"""What goes over the Unix socket: asking for a region's memory, and what is said about it.

A SOCK_SEQPACKET socket in the abstract namespace, so messages keep their borders and no file
is left behind. All are little-endian, and of 32 bytes but for `note`:

    ask     peer to owner    4s "HMS1" | u32 0                          | u64 generation | 16s key
    note    peer to owner    4s "HMS1" | u32 1 | u64 generation | 16s id | MessagePack array of
                             sender and message (a notification; not over 8,192 bytes in all)
    notice  owner to peer    4s "HMS1" | u8 kind | u8 status | u16 0    | u64 number     | 16s key

Kinds of notices: 1 granted (with the memfd as SCM_RIGHTS, `number` is its length), 2 refused
(`status` and `number` as in `regions.Status`), 3 revoked (the region is not registered any
more; unasked), 4 noted (the answer to a note, `key` is its id). The connection stays open: when
it closes, the owner is gone.
"""

import struct

import msgspec

from halfmoon_transfer import plan
from halfmoon_transfer.interface import MAX_NOTIFICATION_BYTES
from halfmoon_transfer.regions import Status

MESSAGE_BYTES = 32
MAX_NOTE_BYTES = 8192
_MAGIC = b"HMS1"
_ASK = struct.Struct("<4sIQ16s")
_NOTICE = struct.Struct("<4sBBHQ16s")

GRANTED, REFUSED, REVOKED, NOTED = 1, 2, 3, 4
_ASKING, _NOTING = 0, 1
_STATUSES = frozenset(Status)


class WireError(ValueError):
    """What came is not one of these messages."""


class Ask(msgspec.Struct, frozen=True):
    """May I map this region?"""

    generation: int
    key: bytes


class Note(msgspec.Struct, frozen=True):
    """A notification for the owner."""

    generation: int
    notice: plan.Notice


class Notice(msgspec.Struct, frozen=True):
    """What the owner says about a region."""

    kind: int
    status: Status
    number: int
    key: bytes


def encode_ask(ask: Ask) -> bytes:
    """The 32 bytes."""
    return _ASK.pack(_MAGIC, _ASKING, ask.generation, ask.key)


def encode_note(note: Note) -> bytes:
    """The head and the words."""
    head = _ASK.pack(_MAGIC, _NOTING, note.generation, note.notice.id)
    return head + msgspec.msgpack.encode((note.notice.sender, note.notice.message))


def decode_ask(message: bytes) -> Ask | Note:
    """Read what a peer asks.

    Raises:
        WireError: it is nothing that can be asked.
    """
    if len(message) < MESSAGE_BYTES or message[:4] != _MAGIC:
        raise WireError(f"not a request for a region: {message[:8]!r}, {len(message)} bytes")
    _, kind, generation, key = _ASK.unpack(message[:MESSAGE_BYTES])
    if kind == _ASKING and len(message) == MESSAGE_BYTES:
        return Ask(generation, key)
    if kind != _NOTING or len(message) > MAX_NOTE_BYTES:
        raise WireError(f"a request of kind {kind}, {len(message)} bytes")
    try:
        words = msgspec.msgpack.decode(message[MESSAGE_BYTES:], type=tuple[str, bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a note: {error}") from None
    if len(words[1]) > MAX_NOTIFICATION_BYTES:
        raise WireError(f"a note of {len(words[1])} bytes, at most {MAX_NOTIFICATION_BYTES}")
    return Note(generation, plan.Notice(key, *words))


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
    if kind not in (GRANTED, REFUSED, REVOKED, NOTED) or status not in _STATUSES:
        raise WireError(f"a notice of kind {kind}, status {status}")
    return Notice(kind, Status(status), number, key)
