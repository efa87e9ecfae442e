"""One file of blocks on a disk: its format, and reading and writing its slots.

    page 0         what this file is: block size, number of slots, KV layout; with a checksum
    pages 1 … h    one header of 128 bytes per slot, 32 to a page
    then           the slots, each a whole number of pages

A header says which block is in its slot, and has a checksum of its own. It is written after the
block's bytes and cleared before they are overwritten: so a process that is killed in the middle
leaves a slot without a header, never a header without its bytes. What a failing disk or a loss
of power does to the bytes, their checksum shows when they are read. Headers go through the page
cache, which outlives the process, and are not kept in memory.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.layout import KvLayout
from halfmoon_scheduling.disk_map import BlockRecord
from halfmoon_transfer.region_file import BLOCK_BYTES as PAGE_BYTES
from halfmoon_transfer.region_file import RegionFile

_MAGIC = b"HMKVSEG1"
#: magic, length of what follows as JSON.
_FRONT = struct.Struct("<8sI")
#: mark, depth, sequence, bytes, their xxh3-64, generation, lengths of hash and parent, and these
#: padded with zeros; then an xxh3-64 of all that.
_HEADER = struct.Struct("<4sIQQQQBB6x32s32s8xQ")
_MARK = b"BLK1"
_CHECKSUM_AT = _HEADER.size - 8
_EMPTY = bytes(_HEADER.size)
_PER_PAGE = PAGE_BYTES // _HEADER.size
#: Bytes of a block's hash at the most.
MAX_HASH_BYTES = 32


class SegmentShape(msgspec.Struct, frozen=True):
    """What page 0 says."""

    layout: KvLayout
    n_slots: int

    @classmethod
    def fitting(cls, layout: KvLayout, n_bytes: int) -> "SegmentShape":
        """As many slots as fit into a file of this size, perhaps none."""
        shape = cls(layout, max(0, (n_bytes - PAGE_BYTES) // (_slot_bytes(layout) + _HEADER.size)))
        while shape.n_slots > 0 and shape.n_bytes > n_bytes:
            shape = cls(layout, shape.n_slots - 1)
        return shape

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a block, rounded up to whole pages."""
        return _slot_bytes(self.layout)

    @property
    def headers_bytes(self) -> int:
        """Bytes of all headers, in whole pages."""
        return -(-self.n_slots // _PER_PAGE) * PAGE_BYTES

    @property
    def n_bytes(self) -> int:
        """Length of the file."""
        return self.offset(self.n_slots)

    def offset(self, slot: int) -> int:
        """Where a slot begins."""
        return PAGE_BYTES + self.headers_bytes + slot * self.slot_bytes


class Found(msgspec.Struct, frozen=True):
    """A block that a segment has, by its header."""

    slot: int
    record: BlockRecord
    #: Which write of the node it was: the higher one is the later one.
    sequence: int


class Segment:
    """An open segment file. Different slots may be used by several threads at once."""

    def __init__(self, path: Path, shape: SegmentShape) -> None:
        """Open it if it is of this shape, else make it anew, with all its bytes allocated.

        Raises:
            OSError: it can't be made or opened, or the file system has no room for it; then
                nothing of it is left.
        """
        self.path = path
        self.shape = shape
        if read_shape(path) != shape or path.stat().st_size != shape.n_bytes:
            _make(path, shape)
        self._file = RegionFile(path)
        #: 1 for each slot with a header.
        self._has_header = bytearray(header != _EMPTY for header in self._headers())

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._file.direct

    @property
    def n_used(self) -> int:
        """Slots with a header."""
        return self._has_header.count(1)

    def blocks(self) -> Iterator[Found]:
        """What is in the slots, by the headers that are whole and of this shape."""
        for slot, header in enumerate(self._headers()):
            if (found := _parse(header, slot, self.shape.layout.block_bytes)) is not None:
                yield found

    def block(self, slot: int) -> Found | None:
        """What is in a slot, if its header is whole and of this shape."""
        header = bytearray(_HEADER.size)
        self._file.load(_header_offset(slot), memoryview(header))
        return _parse(bytes(header), slot, self.shape.layout.block_bytes)

    def write(self, found: Found, generation: int, view: memoryview) -> None:
        """Put a block into a slot, whatever was in it.

        Raises:
            OSError: the disk says so; the slot holds nothing, or what it held.
        """
        self.erase(found.slot)
        self._file.store(self.shape.offset(found.slot), view)
        self._set_header(found.slot, _header(found, generation, len(view)))

    def read(self, slot: int, view: memoryview) -> None:
        """Read a slot's bytes; whether they are right is not looked at.

        Raises:
            OSError: the disk says so.
            FileShrunk: the file has become shorter.
        """
        self._file.load(self.shape.offset(slot), view)

    def erase(self, slot: int) -> None:
        """Clear a slot's header, if it has one.

        Raises:
            OSError: the disk says so.
        """
        if self._has_header[slot]:
            self._set_header(slot, _EMPTY)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _set_header(self, slot: int, header: bytes) -> None:
        self._file.store(_header_offset(slot), memoryview(header))
        self._has_header[slot] = header != _EMPTY

    def _headers(self) -> Iterator[bytes]:
        """Of all slots, in order. They are read at once, and kept no longer than that."""
        with mmap.mmap(-1, self.shape.headers_bytes) as pages:
            self._file.load(PAGE_BYTES, memoryview(pages))
            for slot in range(self.shape.n_slots):
                yield pages[slot * _HEADER.size : (slot + 1) * _HEADER.size]


def read_shape(path: Path) -> SegmentShape | None:
    """What a file says that it is; None if it is no segment, or there is none."""
    try:
        with path.open("rb") as file:
            page = file.read(PAGE_BYTES)
    except FileNotFoundError:
        return None
    if len(page) < PAGE_BYTES or page[-8:] != _xxh3(page[:-8]):
        return None
    magic, length = _FRONT.unpack_from(page)
    if magic != _MAGIC:
        return None
    try:
        return msgspec.json.decode(page[_FRONT.size : _FRONT.size + length], type=SegmentShape)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _make(path: Path, shape: SegmentShape) -> None:
    """Page 0 is written last: a file that is not finished is none."""
    text = msgspec.json.encode(shape)
    front = (_FRONT.pack(_MAGIC, len(text)) + text).ljust(PAGE_BYTES - 8, b"\0")
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.n_bytes)
        os.pwrite(fd, front + _xxh3(front), 0)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _header(found: Found, generation: int, n_bytes: int) -> bytes:
    record = found.record
    parent = record.parent or b""
    header = _HEADER.pack(
        _MARK, record.depth, found.sequence, n_bytes, record.checksum, generation,
        len(record.hash), len(parent), record.hash, parent, 0,
    )  # fmt: skip
    return header[:_CHECKSUM_AT] + _xxh3(header[:_CHECKSUM_AT])


def _parse(header: bytes, slot: int, block_bytes: int) -> Found | None:
    if header[:4] != _MARK or header[_CHECKSUM_AT:] != _xxh3(header[:_CHECKSUM_AT]):
        return None
    _, depth, sequence, n_bytes, checksum, _, n_hash, n_parent, name, parent, _ = _HEADER.unpack(
        header
    )
    if n_bytes != block_bytes:
        return None
    above = BlockHash(parent[:n_parent]) if n_parent else None
    return Found(slot, BlockRecord(BlockHash(name[:n_hash]), above, depth, checksum), sequence)


def _header_offset(slot: int) -> int:
    return PAGE_BYTES + slot * _HEADER.size


def _slot_bytes(layout: KvLayout) -> int:
    return -(-layout.block_bytes // PAGE_BYTES) * PAGE_BYTES


def _xxh3(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
