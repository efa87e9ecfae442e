"""What a segment file says of itself, in its first page and in a copy in its last one.

    magic, length of the text   HMKVSEG2; HMKVSEG1 is a file without copies, see `segment`
    the text                    the file's shape, as JSON
    zeros
    checksum                    xxh3-64 of all bytes before it, in the last 8 of the page

A file is lost only if both pages are. A file of version 1 has one such page: one damaged byte in
its text or checksum, and any damage in its zeros, is undone by means of the checksum.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_transfer.regions.file_region import BLOCK_BYTES as PAGE_BYTES

_MAGIC = {1: b"HMKVSEG1", 2: b"HMKVSEG2"}
_MAGIC_OF_ANY_VERSION = b"HMKVSEG"
#: Magic, length of the text.
_HEAD = struct.Struct("<8sI")
_SUM_AT = PAGE_BYTES - 8
#: Bytes of one slot's header, see `slot_header`.
HEADER_BYTES = 128
HEADERS_PER_PAGE = PAGE_BYTES // HEADER_BYTES


class SegmentShape(msgspec.Struct, frozen=True):
    """What a file is made for: which blocks, and how many."""

    layout: KvLayout
    n_slots: int

    @classmethod
    def fitting(cls, layout: KvLayout, n_bytes: int, *, n_copies: int = 2) -> "SegmentShape":
        """As many slots as fit into a file of this size, perhaps none.

        Args:
            layout: of its blocks.
            n_bytes: of the file.
            n_copies: of the first page and the headers: 1 for a file of version 1.
        """
        slot_bytes = cls(layout, 0).slot_bytes + n_copies * HEADER_BYTES
        n_slots = max(0, (n_bytes - n_copies * PAGE_BYTES) // slot_bytes)
        while n_slots > 0 and cls(layout, n_slots).bytes_with(n_copies) > n_bytes:
            n_slots -= 1
        return cls(layout, n_slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a block, rounded up to whole pages."""
        return -(-self.layout.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def headers_bytes(self) -> int:
        """Bytes of all headers, once, in whole pages."""
        return -(-self.n_slots // HEADERS_PER_PAGE) * PAGE_BYTES

    @property
    def n_bytes(self) -> int:
        """Length of the file."""
        return self.bytes_with(2)

    def bytes_with(self, n_copies: int) -> int:
        """Length of a file with so many copies of the first page and of the headers."""
        return n_copies * (PAGE_BYTES + self.headers_bytes) + self.n_slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return PAGE_BYTES + self.headers_bytes + slot * self.slot_bytes

    def header_offsets(self, slot: int) -> tuple[int, int]:
        """Where a slot's header and its copy begin."""
        within = slot * HEADER_BYTES
        return PAGE_BYTES + within, self.offset(self.n_slots) + within

    @property
    def front_offsets(self) -> tuple[int, int]:
        """Where the first page and its copy begin."""
        return 0, self.n_bytes - PAGE_BYTES


class SegmentSuperblock(msgspec.Struct, frozen=True):
    """What was read of a file's first page or of its copy."""

    shape: SegmentShape
    version: int


def encode_superblock(shape: SegmentShape) -> bytes:
    """The first page of a file, and its last one."""
    text = msgspec.json.encode(shape)
    page = (_HEAD.pack(_MAGIC[2], len(text)) + text).ljust(_SUM_AT, b"\0")
    return page + _sum(page)


def read_superblock(path: Path) -> SegmentSuperblock | None:
    """What a file says that it is; None if it says nothing that can be read.

    Raises:
        OSError: it can't be read at all; FileNotFoundError: there is none.
    """
    with path.open("rb") as file:
        first = _page(file.fileno(), 0)
        last = _page(file.fileno(), file.seek(0, 2) - PAGE_BYTES)
    return _parse(first) or _parse(last) or _mended(first)


def read_shape(path: Path) -> SegmentShape | None:
    """The shape of a file; None if it is no segment, or there is none."""
    try:
        front = read_superblock(path)
    except OSError:
        return None
    return None if front is None else front.shape


def why_unreadable(path: Path) -> str:
    """Why `read_front` returned None."""
    with path.open("rb") as file:
        first = _page(file.fileno(), 0)
    magic = first[:8]
    is_whole = len(first) == PAGE_BYTES and first[_SUM_AT:] == _sum(first[:_SUM_AT])
    if is_whole and magic.startswith(_MAGIC_OF_ANY_VERSION) and magic not in _MAGIC.values():
        return f"its format is {magic.decode('ascii', 'replace')}, which this version can't read"
    return "neither its first page nor the copy at its end can be read"


def _page(fd: int, at: int) -> bytes:
    """One page of a file; a part of it, or nothing, where the file or the disk has no more."""
    try:
        return os.pread(fd, PAGE_BYTES, at) if at >= 0 else b""
    except OSError:
        return b""


def _parse(page: bytes) -> SegmentSuperblock | None:
    """What a page says, if its checksum is right."""
    if len(page) < PAGE_BYTES or page[_SUM_AT:] != _sum(page[:_SUM_AT]):
        return None
    return _decode(page)


def _decode(page: bytes) -> SegmentSuperblock | None:
    """What a page says, whatever its checksum."""
    magic, length = _HEAD.unpack_from(page)
    version = next((number for number, known in _MAGIC.items() if magic == known), None)
    if version is None or _HEAD.size + length > _SUM_AT:
        return None
    try:
        shape = msgspec.json.decode(page[_HEAD.size : _HEAD.size + length], type=SegmentShape)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    return (
        SegmentSuperblock(shape, version) if shape.n_slots >= 0 and shape.slot_bytes > 0 else None
    )


def _mended(page: bytes) -> SegmentSuperblock | None:
    """What a page said before its zeros, or one byte of the rest, were damaged."""
    if len(page) < PAGE_BYTES:
        return None
    for candidate in _candidates(page):
        if (front := _parse(candidate)) is not None:
            return front
    return None


def _candidates(page: bytes) -> Iterator[bytes]:
    """Pages that it may have been."""
    _, length = _HEAD.unpack_from(page)
    end = _HEAD.size + length
    if end <= _SUM_AT:
        cleared = page[:end].ljust(_SUM_AT, b"\0")
        yield cleared + page[_SUM_AT:]
        right = _sum(cleared)
        if sum(a != b for a, b in zip(right, page[_SUM_AT:], strict=True)) == 1:
            yield cleared + right
    # The text ends where the zeros begin: what is damaged is before that.
    trial = bytearray(page)
    for at in range(len(page[:_SUM_AT].rstrip(b"\0"))):
        for value in range(256):
            trial[at] = value
            if trial[_SUM_AT:] == _sum(memoryview(trial)[:_SUM_AT]):
                yield bytes(trial)
        trial[at] = page[at]


def _sum(data: bytes | memoryview) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
