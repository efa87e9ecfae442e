"""Encode the superblock of a segment file: its first page, with a copy in its last page.

    magic, length of the text   HMKVSEG2; HMKVSEG1 is a file without copies, see `segment_file`
    the text                    the file's shape, as JSON
    zeros
    checksum                    xxh3-64 of all bytes before it, in the last 8 of the page

A file is lost only if both pages are. A file of version 1 has one such page. By its checksum, one
damaged byte in the text or checksum, and any damage in the zeros, can be repaired.
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
#: Bytes of one slot's header: see `slot_header`.
HEADER_BYTES = 128
HEADERS_PER_PAGE = PAGE_BYTES // HEADER_BYTES


class SegmentShape(msgspec.Struct, frozen=True):
    """Shape of a file: the layout and the number of its blocks."""

    layout: KvLayout
    n_slots: int

    @classmethod
    def fitting(cls, layout: KvLayout, n_bytes: int, *, n_copies: int = 2) -> "SegmentShape":
        """Return the shape with as many slots as fit into a file of this size, perhaps none.

        Args:
            layout: layout of the blocks.
            n_bytes: size of the file.
            n_copies: copies of the first page and the headers; 1 for a file of version 1.
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
        """Bytes of one copy of all headers, in whole pages."""
        return -(-self.n_slots // HEADERS_PER_PAGE) * PAGE_BYTES

    @property
    def n_bytes(self) -> int:
        """Length of the file, in bytes."""
        return self.bytes_with(2)

    def bytes_with(self, n_copies: int) -> int:
        """Return the length of a file with so many copies of the first page and the headers."""
        return n_copies * (PAGE_BYTES + self.headers_bytes) + self.n_slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Return the offset of a slot."""
        return PAGE_BYTES + self.headers_bytes + slot * self.slot_bytes

    def header_offsets(self, slot: int) -> tuple[int, int]:
        """Return the offsets of a slot's header and of its copy."""
        within = slot * HEADER_BYTES
        return PAGE_BYTES + within, self.offset(self.n_slots) + within

    @property
    def superblock_offsets(self) -> tuple[int, int]:
        """Offsets of the first page and of its copy."""
        return 0, self.n_bytes - PAGE_BYTES


class SegmentSuperblock(msgspec.Struct, frozen=True):
    """A superblock, as read from a file's first page or its copy."""

    shape: SegmentShape
    version: int


def encode_superblock(shape: SegmentShape) -> bytes:
    """Return the first page of a file, which is also its last."""
    text = msgspec.json.encode(shape)
    page = (_HEAD.pack(_MAGIC[2], len(text)) + text).ljust(_SUM_AT, b"\0")
    return page + _sum(page)


def read_superblock(path: Path) -> SegmentSuperblock | None:
    """Read a file's superblock; return None if neither copy can be decoded.

    Raises:
        OSError: the file can't be read; FileNotFoundError: it does not exist.
    """
    with path.open("rb") as file:
        first = _page(file.fileno(), 0)
        last = _page(file.fileno(), file.seek(0, 2) - PAGE_BYTES)
    return _parse(first) or _parse(last) or _repaired(first)


def read_shape(path: Path) -> SegmentShape | None:
    """Read the shape of a file; return None if the file is no segment or does not exist."""
    try:
        front = read_superblock(path)
    except OSError:
        return None
    return None if front is None else front.shape


def why_unreadable(path: Path) -> str:
    """Return the reason why `read_superblock` returned None."""
    with path.open("rb") as file:
        first = _page(file.fileno(), 0)
    magic = first[:8]
    is_whole = len(first) == PAGE_BYTES and first[_SUM_AT:] == _sum(first[:_SUM_AT])
    if is_whole and magic.startswith(_MAGIC_OF_ANY_VERSION) and magic not in _MAGIC.values():
        return f"its format is {magic.decode('ascii', 'replace')}, which this version can't read"
    return "neither its first page nor the copy at its end can be read"


def _page(fd: int, at: int) -> bytes:
    """Read one page of a file; return fewer bytes where the file or the disk ends."""
    try:
        return os.pread(fd, PAGE_BYTES, at) if at >= 0 else b""
    except OSError:
        return b""


def _parse(page: bytes) -> SegmentSuperblock | None:
    """Decode a page if its checksum is right."""
    if len(page) < PAGE_BYTES or page[_SUM_AT:] != _sum(page[:_SUM_AT]):
        return None
    return _decode(page)


def _decode(page: bytes) -> SegmentSuperblock | None:
    """Decode a page without checking its checksum."""
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


def _repaired(page: bytes) -> SegmentSuperblock | None:
    """Decode a page whose zeros, or one other byte, are damaged."""
    if len(page) < PAGE_BYTES:
        return None
    for candidate in _candidates(page):
        if (front := _parse(candidate)) is not None:
            return front
    return None


def _candidates(page: bytes) -> Iterator[bytes]:
    """Yield the pages that the damaged page may have been."""
    _, length = _HEAD.unpack_from(page)
    end = _HEAD.size + length
    if end <= _SUM_AT:
        cleared = page[:end].ljust(_SUM_AT, b"\0")
        yield cleared + page[_SUM_AT:]
        right = _sum(cleared)
        if sum(a != b for a, b in zip(right, page[_SUM_AT:], strict=True)) == 1:
            yield cleared + right
    # The text ends where the zeros begin: the damaged byte is before that.
    trial = bytearray(page)
    for at in range(len(page[:_SUM_AT].rstrip(b"\0"))):
        for value in range(256):
            trial[at] = value
            if trial[_SUM_AT:] == _sum(memoryview(trial)[:_SUM_AT]):
                yield bytes(trial)
        trial[at] = page[at]


def _sum(data: bytes | memoryview) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
