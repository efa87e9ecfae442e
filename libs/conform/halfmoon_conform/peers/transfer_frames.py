"""Write and read the bytes of a transfer connection, wrong ones too. Pure.

This is a second writing of docs/protocol.md, apart from the transfer library's: the kit must be
able to send what that library refuses to.
"""

import struct
from dataclasses import dataclass, field

import xxhash

READ, WRITE, NOTIFY, FAILED = 1, 2, 3, 255
CHECKSUMS = 1
HELLO, PROOF, REQUEST, REPLY = b"HMTH", b"HMTP", b"HMTQ", b"HMTR"
MAX_SLICES = 1024
MAX_SLICE_BYTES = 16 * 1024 * 1024
MAX_HELLO_BYTES = 4096

OK, OUT_OF_BOUNDS, UNKNOWN_KEY, OTHER_GENERATION = 0, 1, 2, 3
CHECKSUM_MISMATCH, NOT_GRANTED = 6, 11

START = struct.Struct("<4sBBH")
HEADER = struct.Struct("<4sBBHIIQQ")
ASKED = struct.Struct("<16sQIIQ")
ANSWERED = struct.Struct("<B7xQ")
SUM = struct.Struct("<Q")


def checksum(data: bytes | memoryview) -> int:
    """Return the xxh3-64 of these bytes."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class SliceEntry:
    """One slice of a request: where, how long, and the checksum of what is written."""

    key: bytes
    offset: int
    length: int
    sum: int = 0


@dataclass(frozen=True)
class RequestHead:
    """The head of a request; each part may be one that the protocol forbids."""

    op: int
    number: int
    generation: int
    entries: list[SliceEntry] = field(default_factory=list)
    flags: int = CHECKSUMS
    version: int = 1
    magic: bytes = REQUEST

    def encode(self, *, damage: bool = False) -> bytes:
        """Encode header, entries and checksum; with `damage`, a wrong checksum."""
        head = HEADER.pack(
            self.magic,
            self.version,
            self.op,
            len(self.entries),
            self.flags,
            0,
            self.number,
            self.generation,
        )
        head += b"".join(ASKED.pack(e.key, e.offset, e.length, 0, e.sum) for e in self.entries)
        return head + SUM.pack(checksum(head) ^ int(damage))


@dataclass(frozen=True)
class ReplyHead:
    """The head of a reply."""

    op: int
    number: int
    #: Status and detail of each slice.
    entries: list[tuple[int, int]]
    #: Of a request that could not be read: why.
    text: str = ""

    def encode(self) -> bytes:
        """Encode header, entries and checksum."""
        head = HEADER.pack(REPLY, 1, self.op, len(self.entries), 0, 0, self.number, 0)
        head += b"".join(ANSWERED.pack(status, detail) for status, detail in self.entries)
        return head + SUM.pack(checksum(head))


def encode_start(magic: bytes, body: bytes, version: int = 1) -> bytes:
    """Encode a hello or a proof around its map."""
    return START.pack(magic, version, 0, len(body)) + body


def start_fault(magic: bytes, found: bytes, version: int, length: int) -> str:
    """Say what is wrong with the first 8 bytes of a hello or a proof; "" if nothing is."""
    if found != magic:
        return f"it begins with {found!r}, not with {magic!r}"
    if version != 1:
        return f"its version is {version}, not 1"
    if length > MAX_HELLO_BYTES:
        return f"its length, a u16 of little-endian, is {length}, at most {MAX_HELLO_BYTES}"
    return ""
