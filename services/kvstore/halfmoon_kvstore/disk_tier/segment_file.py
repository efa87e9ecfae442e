"""Open and repair one file of blocks on a disk, and read and write its slots.

    page 0         superblock: block size, number of slots, KV layout; with a checksum
    pages 1 … h    one header of 128 bytes per slot, 32 to a page
    then           the slots, each a whole number of pages
    then           h pages: a copy of each header
    last page      a copy of page 0

A header names the block in its slot, and has its own checksum. Both copies are written after the
block's bytes, and cleared before the bytes are overwritten. So a process that is killed meanwhile
leaves a slot without a header, never a header without its bytes. Damage to the bytes by a failing
disk or a loss of power is found by their checksum when they are read. Headers go through the page
cache, which outlives the process, and are not kept in memory.

Opening the file replaces a damaged header or page 0 by its copy. A file of version 1 ends after the
slots; opening it appends the copies.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from halfmoon_kvstore.disk_tier.slot_header import EMPTY, SlotEntry, SlotHeaderCodec
from halfmoon_kvstore.disk_tier.superblock import (
    HEADER_BYTES,
    SegmentShape,
    SegmentSuperblock,
    encode_superblock,
    read_superblock,
)
from halfmoon_transfer.regions.file_region import BLOCK_BYTES as PAGE_BYTES
from halfmoon_transfer.regions.file_region import FileRegion, FileShrunk


class SegmentRepair(msgspec.Struct, frozen=True, kw_only=True):
    """Damage that was repaired when a file was opened."""

    #: Whether page 0 or its copy was damaged.
    superblock: bool = False
    #: Headers that were restored from their copy.
    n_headers: int = 0
    #: Blocks that are lost: both headers are, or the file ends before their bytes.
    n_blocks_lost: int = 0
    #: Bytes missing at the end of the file.
    n_bytes_missing: int = 0
    #: Pages of headers that the disk could not read.
    n_pages_unreadable: int = 0


class SegmentFile:
    """Read and write an open segment file. Threads may use different slots at once."""

    def __init__(
        self, path: Path, shape: SegmentShape, superblock: SegmentSuperblock | None = None
    ) -> None:
        """Open and repair a file of this shape, or make a new one.

        Args:
            path: path of the file.
            shape: shape of the file.
            superblock: the file's superblock, of the same shape; None: the file is made anew.

        Raises:
            OSError: the file can't be made or opened, or the file system is full. A new file is
                removed again; an existing file stays as it is.
        """
        self.path = path
        self.shape = shape
        self._headers = SlotHeaderCodec(shape)
        if superblock is None:
            _make(path, shape)
        n_bytes = path.stat().st_size
        _lengthen(path, shape.n_bytes)
        self._file = FileRegion(path)
        #: 1 for each slot with a header that must be cleared before the slot is written.
        self._has_header = bytearray(shape.n_slots)
        #: Damage that opening the file repaired.
        self.repair = SegmentRepair()
        if superblock is not None:
            self._repair_copies(superblock, n_bytes)

    @property
    def direct(self) -> bool:
        """True if block bytes bypass the page cache."""
        return self._file.direct

    @property
    def n_used(self) -> int:
        """Number of slots with a header."""
        return self._has_header.count(1)

    def blocks(self) -> Iterator[SlotEntry]:
        """Yield the entries of the slots whose header is intact and of this shape."""
        pages = _Pages(self._file, self.shape)
        for slot in range(self.shape.n_slots):
            found = self._chosen(*pages.headers(slot), slot)
            if found is not None:
                yield found

    def sequences(self) -> Iterator[tuple[int, int]]:
        """Yield each slot that holds a block, with the sequence number of its write."""
        pages = _Pages(self._file, self.shape)
        for slot in range(self.shape.n_slots):
            header = self._headers.merge(*pages.headers(slot), slot)
            if header and (sequence := self._headers.sequence(header, slot)) is not None:
                yield slot, sequence

    def block(self, slot: int) -> SlotEntry | None:
        """Return the entry of a slot, if one of its headers is intact and of this shape."""
        header = bytearray(HEADER_BYTES)
        for offset in self.shape.header_offsets(slot):
            with suppress(OSError):  # the other copy is read, too
                self._file.load(offset, memoryview(header))
                if (found := self._headers.parse(bytes(header), slot)) is not None:
                    return found
        return None

    def write(self, found: SlotEntry, generation: int, view: memoryview) -> None:
        """Write a block into a slot, and replace the block that was there.

        Raises:
            OSError: the write failed; the slot is empty, or holds the old or the new block.
        """
        self.erase(found.slot)
        self._file.store(self.shape.offset(found.slot), view)
        self._has_header[found.slot] = 1
        self._set_headers(found.slot, self._headers.pack(found, generation))

    def read(self, slot: int, view: memoryview) -> None:
        """Read a slot's bytes without verifying them.

        Raises:
            OSError: the read failed.
            FileShrunk: the file has become shorter.
        """
        self._file.load(self.shape.offset(slot), view)

    def erase(self, slot: int) -> None:
        """Clear a slot's headers, if it has any.

        Raises:
            OSError: the write failed.
        """
        if self._has_header[slot]:
            self._set_headers(slot, EMPTY)
            self._has_header[slot] = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _set_headers(self, slot: int, header: bytes) -> None:
        for offset in self.shape.header_offsets(slot):
            self._file.store(offset, memoryview(header))

    def _chosen(self, first: bytes, second: bytes, slot: int) -> SlotEntry | None:
        header = self._headers.merge(first, second, slot)
        return None if not header else self._headers.parse(header, slot)

    # -- mending -----------------------------------------------------------------------------

    def _repair_copies(self, superblock: SegmentSuperblock, n_bytes: int) -> None:
        """Make both copies of superblock and headers equal, and count lost blocks.

        Args:
            superblock: the file's superblock.
            n_bytes: length of the file before it was opened.
        """
        shape = self.shape
        pages = _Pages(self._file, shape)
        n_headers = n_lost = 0
        for slot in range(shape.n_slots):
            first, second = pages.headers(slot)
            right = self._headers.merge(first, first if superblock.version == 1 else second, slot)
            end = shape.offset(slot) + shape.layout.block_bytes
            if right is None or (right != EMPTY and end > n_bytes):
                right, n_lost = EMPTY, n_lost + 1
            n_headers += right != EMPTY and first != second
            self._has_header[slot] = not right == first == second == EMPTY
            if not right == first == second:
                with suppress(OSError):  # the header is then cleared before the slot is written
                    self._set_headers(slot, right)
                    self._has_header[slot] = right != EMPTY
        fronts_differ = self._repair_superblock()
        is_old = superblock.version == 1
        self.repair = SegmentRepair(
            superblock=fronts_differ and not is_old,
            n_headers=0 if is_old else n_headers,
            n_blocks_lost=n_lost,
            n_bytes_missing=max(0, shape.bytes_with(superblock.version) - n_bytes),
            n_pages_unreadable=pages.n_unreadable,
        )

    def _repair_superblock(self) -> bool:
        """Rewrite page 0 and its copy where they are damaged; return whether one was."""
        page = encode_superblock(self.shape)
        found = False
        for offset in reversed(
            self.shape.superblock_offsets
        ):  # page 0 of version 1 is replaced last
            there = bytearray(PAGE_BYTES)
            with suppress(OSError):
                self._file.load(offset, memoryview(there))
            if there != page:
                found = True
                with suppress(OSError):
                    self._file.store(offset, memoryview(page))
        return found


class _Pages:
    """Hold both copies of all headers of a file, outside of Python's heap."""

    def __init__(self, file: FileRegion, shape: SegmentShape) -> None:
        """Read the headers; a page that can't be read counts as zeros."""
        self.n_unreadable = 0
        self._file = file
        self._copies = [
            self._loaded(offset, shape.headers_bytes) for offset in shape.header_offsets(0)
        ]

    def headers(self, slot: int) -> tuple[bytes, bytes]:
        """Return both headers of a slot."""
        first, second = (
            copy[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] for copy in self._copies
        )
        return first, second

    def _loaded(self, offset: int, n_bytes: int) -> mmap.mmap:
        pages = mmap.mmap(-1, max(n_bytes, PAGE_BYTES))
        with memoryview(pages) as view:
            try:
                self._file.load(offset, view[:n_bytes])
            except (OSError, FileShrunk):
                for at in range(0, n_bytes, PAGE_BYTES):
                    self._load_page(offset + at, view[at : at + PAGE_BYTES])
        return pages

    def _load_page(self, offset: int, view: memoryview) -> None:
        try:
            self._file.load(offset, view)
        except (OSError, FileShrunk):
            self.n_unreadable += 1
            view[:] = bytes(len(view))


def scan_blocks(path: Path) -> list[SlotEntry]:
    """Return the blocks of a file by its headers, without changing the file.

    The file may be in use. A file that is no segment, or can't be read, has no blocks.
    """
    try:
        superblock = read_superblock(path)
        if superblock is None:
            return []
        file = FileRegion(path, writable=False, direct=False)
    except OSError:
        return []
    headers, found = SlotHeaderCodec(superblock.shape), []
    pages = _Pages(file, superblock.shape)
    for slot in range(superblock.shape.n_slots):
        first, second = pages.headers(slot)
        header = headers.merge(first, first if superblock.version == 1 else second, slot)
        if header and (block := headers.parse(header, slot)) is not None:
            found.append(block)
    file.close()
    return found


def _make(path: Path, shape: SegmentShape) -> None:
    """Make a file; page 0 is written last, so that an unfinished file is no segment."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.n_bytes)
        for offset in reversed(shape.superblock_offsets):
            os.pwrite(fd, encode_superblock(shape), offset)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _lengthen(path: Path, n_bytes: int) -> None:
    """Extend a file with zeros to this length, and allocate the space if there is room."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        n_there = os.fstat(fd).st_size
        if n_there >= n_bytes:
            return
        try:
            os.posix_fallocate(fd, n_there, n_bytes - n_there)
        except OSError:
            os.ftruncate(fd, n_bytes)
    finally:
        os.close(fd)
