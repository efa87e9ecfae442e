"""One file of blocks on a disk: opening it, mending it, and reading and writing its slots.

    page 0         what this file is: block size, number of slots, KV layout; with a checksum
    pages 1 … h    one header of 128 bytes per slot, 32 to a page
    then           the slots, each a whole number of pages
    then           h pages: each header again
    last page      page 0 again

A header says which block is in its slot, and has a checksum of its own. Both copies are written
after the block's bytes and cleared before they are overwritten: so a process that is killed in
the middle leaves a slot without a header, never a header without its bytes. What a failing disk
or a loss of power does to the bytes, their checksum shows when they are read. Headers go through
the page cache, which outlives the process, and are not kept in memory.

A damaged header or page 0 is taken from its copy when the file is opened, and both are made equal
again. A file of version 1 ends after the slots; when it is opened it gets its copies, and the
space for them beyond its size.
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
    """What was wrong with a file that was opened, and is not any more."""

    #: Whether page 0 or its copy was damaged.
    front: bool = False
    #: Headers that were taken from their copy.
    n_headers: int = 0
    #: Blocks whose header is lost in both places, or whose bytes the file has no more.
    n_blocks_lost: int = 0
    #: Bytes by which the file was too short.
    n_bytes_missing: int = 0
    #: Pages of headers that the disk did not give.
    n_pages_unreadable: int = 0


class SegmentFile:
    """An open segment file. Different slots may be used by several threads at once."""

    def __init__(
        self, path: Path, shape: SegmentShape, front: SegmentSuperblock | None = None
    ) -> None:
        """Open a file of this shape, and mend what is damaged of it; or make a new one.

        Args:
            path: of the file.
            shape: of it.
            front: what the file is, of the same shape; None: it is made anew, whatever it was.

        Raises:
            OSError: it can't be made or opened, or the file system has no room for it. Of one to
                be made nothing is left; one to be opened stays as it is.
        """
        self.path = path
        self.shape = shape
        self._headers = SlotHeaderCodec(shape)
        if front is None:
            _make(path, shape)
        n_bytes = path.stat().st_size
        _lengthen(path, shape.n_bytes)
        self._file = FileRegion(path)
        #: 1 for each slot of which at least one header is to be cleared before it is written.
        self._has_header = bytearray(shape.n_slots)
        #: What was wrong with it.
        self.mended = SegmentRepair()
        if front is not None:
            self._mend(front, n_bytes)

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._file.direct

    @property
    def n_used(self) -> int:
        """Slots with a header."""
        return self._has_header.count(1)

    def blocks(self) -> Iterator[SlotEntry]:
        """What is in the slots, by the headers that are whole and of this shape."""
        pages = _Pages(self._file, self.shape)
        for slot in range(self.shape.n_slots):
            found = self._chosen(*pages.headers(slot), slot)
            if found is not None:
                yield found

    def sequences(self) -> Iterator[tuple[int, int]]:
        """The slots that hold a block, each with the write that it is of."""
        pages = _Pages(self._file, self.shape)
        for slot in range(self.shape.n_slots):
            header = self._headers.merge(*pages.headers(slot), slot)
            if header and (sequence := self._headers.sequence(header, slot)) is not None:
                yield slot, sequence

    def block(self, slot: int) -> SlotEntry | None:
        """What is in a slot, if one of its headers is whole and of this shape."""
        header = bytearray(HEADER_BYTES)
        for offset in self.shape.header_offsets(slot):
            with suppress(OSError):  # there is the other one
                self._file.load(offset, memoryview(header))
                if (found := self._headers.parse(bytes(header), slot)) is not None:
                    return found
        return None

    def write(self, found: SlotEntry, generation: int, view: memoryview) -> None:
        """Put a block into a slot, whatever was in it.

        Raises:
            OSError: the disk says so; the slot holds nothing, or what it held, or the block.
        """
        self.erase(found.slot)
        self._file.store(self.shape.offset(found.slot), view)
        self._has_header[found.slot] = 1
        self._set_headers(found.slot, self._headers.pack(found, generation))

    def read(self, slot: int, view: memoryview) -> None:
        """Read a slot's bytes; whether they are right is not looked at.

        Raises:
            OSError: the disk says so.
            FileShrunk: the file has become shorter.
        """
        self._file.load(self.shape.offset(slot), view)

    def erase(self, slot: int) -> None:
        """Clear a slot's headers, if it has any.

        Raises:
            OSError: the disk says so.
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

    def _mend(self, front: SegmentSuperblock, n_bytes: int) -> None:
        """Make both copies of everything equal; count what is lost.

        Args:
            front: what the file is.
            n_bytes: how long it was.
        """
        shape = self.shape
        pages = _Pages(self._file, shape)
        n_headers = n_lost = 0
        for slot in range(shape.n_slots):
            first, second = pages.headers(slot)
            right = self._headers.merge(first, first if front.version == 1 else second, slot)
            end = shape.offset(slot) + shape.layout.block_bytes
            if right is None or (right != EMPTY and end > n_bytes):
                right, n_lost = EMPTY, n_lost + 1
            n_headers += right != EMPTY and first != second
            self._has_header[slot] = not right == first == second == EMPTY
            if not right == first == second:
                with suppress(OSError):  # then it is done before the slot is written, or later
                    self._set_headers(slot, right)
                    self._has_header[slot] = right != EMPTY
        fronts_differ = self._mend_front()
        is_old = front.version == 1
        self.mended = SegmentRepair(
            front=fronts_differ and not is_old,
            n_headers=0 if is_old else n_headers,
            n_blocks_lost=n_lost,
            n_bytes_missing=max(0, shape.bytes_with(front.version) - n_bytes),
            n_pages_unreadable=pages.n_unreadable,
        )

    def _mend_front(self) -> bool:
        """Write page 0 and its copy where they are not right; whether one was not."""
        page = encode_superblock(self.shape)
        found = False
        for offset in reversed(self.shape.front_offsets):  # page 0 of version 1 stays to the end
            there = bytearray(PAGE_BYTES)
            with suppress(OSError):
                self._file.load(offset, memoryview(there))
            if there != page:
                found = True
                with suppress(OSError):
                    self._file.store(offset, memoryview(page))
        return found


class _Pages:
    """All headers of a file, both copies, outside of Python's heap."""

    def __init__(self, file: FileRegion, shape: SegmentShape) -> None:
        """Read them; a page that can't be read is zeros."""
        self.n_unreadable = 0
        self._file = file
        self._copies = [
            self._loaded(offset, shape.headers_bytes) for offset in shape.header_offsets(0)
        ]

    def headers(self, slot: int) -> tuple[bytes, bytes]:
        """A slot's two."""
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
    """What a file has by its headers; nothing of it is changed.

    The file may be in use. A file that is no segment, or can't be read, has none.
    """
    try:
        front = read_superblock(path)
        if front is None:
            return []
        file = FileRegion(path, writable=False, direct=False)
    except OSError:
        return []
    headers, found = SlotHeaderCodec(front.shape), []
    pages = _Pages(file, front.shape)
    for slot in range(front.shape.n_slots):
        first, second = pages.headers(slot)
        header = headers.merge(first, first if front.version == 1 else second, slot)
        if header and (block := headers.parse(header, slot)) is not None:
            found.append(block)
    file.close()
    return found


def _make(path: Path, shape: SegmentShape) -> None:
    """Page 0 is written last: a file that is not finished is none."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shape.n_bytes)
        for offset in reversed(shape.front_offsets):
            os.pwrite(fd, encode_superblock(shape), offset)
        os.fsync(fd)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _lengthen(path: Path, n_bytes: int) -> None:
    """Make a file as long as it is to be, with zeros: allocated, if there is room."""
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
