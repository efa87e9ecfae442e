"""The memory that an engine lets its peers reach: registered, keyed, bounds-checked.

The owner decides here, for every path alike, whether an access is allowed. An access takes
a lease on its region; `RegionTable.remove` takes the key away first and then waits for the
leases that were given, so whoever unregisters memory may use it for something else.
(A peer that mapped shared memory holds no lease: it is told, see `backends.shm`.)

A region that is a file (`region_file`), or memory of a device (`devices`), has no memory of
its own here: its lease lends a buffer, which `load` fills before its bytes are read, and `store`
writes back before a write to it is acknowledged. For regions in memory both do nothing.
"""

import errno
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from functools import cached_property, partial
from typing import NamedTuple

import msgspec
import numpy as np

from halfmoon_protocol.regions import KEY_BYTES, Region
from halfmoon_transfer.devices.device_interface import DeviceError
from halfmoon_transfer.interface import Piece
from halfmoon_transfer.regions.file_region import FileShrunk, FileThreadPool
from halfmoon_transfer.regions.region_backing import RegionBacking


class AccessStatus(IntEnum):
    """What an owner says about one access; the numbers are on the wire."""

    OK = 0
    #: Detail: the region's length.
    OUT_OF_BOUNDS = 1
    UNKNOWN_KEY = 2
    #: Detail: the owner's generation.
    OTHER_GENERATION = 3
    READ_ONLY = 4
    #: The region is not in memory that can be handed to another process.
    NOT_SHAREABLE = 5
    CHECKSUM_MISMATCH = 6
    #: Nobody takes the notifications. Detail: how many may wait.
    NO_ROOM = 7
    #: The region is a file that gives an error. Detail: the system's error number.
    FILE_FAILED = 8
    #: The region is a file that ends before. Detail: the file's length.
    FILE_SHRUNK = 9
    #: The region is device memory that gives an error. Detail: the driver's number for it.
    DEVICE_FAILED = 10


class AccessRefused(Exception):
    """The owner does not allow an access."""

    def __init__(self, status: AccessStatus, detail: int = 0) -> None:
        super().__init__(status.name)
        self.status = status
        self.detail = detail


class Memory(msgspec.Struct, frozen=True):
    """Shareable memory that an engine made: its region, and this process's view of it."""

    region: Region
    #: Writable; the memory lives as long as the engine or any view of it.
    view: memoryview


class RegionSpan(NamedTuple):
    """A place in one of our regions, and the memory that holds its bytes for the moment."""

    key: bytes
    offset: int
    view: memoryview


class RegionExtent(NamedTuple):
    """How much a region is, and whether it may be written."""

    length: int
    writable: bool


class RegionEntry:
    """One registered buffer, or file, or device memory."""

    def __init__(
        self,
        region: Region,
        view: memoryview,
        location: str,
        fd: int | None,
        file: RegionBacking | None = None,
        *,
        private: bool = False,
    ) -> None:
        self.region = region
        #: The bytes; empty for a file or device memory.
        self.view = view
        #: Where the bytes are: "cpu:0", "*"; what a topology chooses devices by.
        self.location = location
        #: The memfd behind it, ours to close; none for memory that somebody else made.
        self.fd = fd
        #: The file, or device memory, that the region is, if it is one; ours to close.
        self.file = file
        #: Nobody is told of it: what our own transfers use on their way.
        self.private = private
        #: Accesses going on.
        self.n_leases = 0

    @cached_property
    def address(self) -> int:
        """Where the bytes begin in this process's memory."""
        return int(np.frombuffer(self.view, np.uint8).__array_interface__["data"][0])


class RegionTable:
    """All regions of one segment."""

    def __init__(self, segment: str, generation: int) -> None:
        self.segment = segment
        self.generation = generation
        self._entries: dict[bytes, RegionEntry] = {}
        #: Of the entries, those that nobody is told of.
        self._n_private = 0
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        #: Of the entries, those that are files or device memory; each until it is discarded.
        self._files: dict[bytes, RegionBacking] = {}
        self._file_pool = FileThreadPool(f"halfmoon-transfer-{segment}-file")
        #: Called after a region was added, by whoever adds it.
        self._watchers: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._entries) - self._n_private

    def allocate(self, n_bytes: int, location: str) -> Memory:
        """Make memory that other processes of this host can map, zeroed, and register it.

        Raises:
            ValueError: not at least one byte.
            OSError: the system has no more.
        """
        if n_bytes < 1:
            raise ValueError(f"can't allocate {n_bytes} bytes: at least 1")
        fd = os.memfd_create("halfmoon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, n_bytes)
            # A peer that maps it must not be killed because we made it shorter.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            view = memoryview(mmap.mmap(fd, n_bytes))
        except BaseException:
            os.close(fd)
            raise
        return Memory(self._add(view, location, fd), view)

    def register(self, buffer: memoryview, location: str) -> Region:
        """Let peers reach this buffer; a read-only one can be read only.

        Raises:
            ValueError: empty, or not one contiguous run of bytes.
        """
        if not buffer.c_contiguous or buffer.nbytes < 1:
            raise ValueError(
                f"can't register a buffer of {buffer.nbytes} bytes, contiguous: "
                f"{buffer.c_contiguous}; it must be contiguous and not empty"
            )
        return self._add(buffer.cast("B"), location, None)

    def register_file(self, file: RegionBacking, location: str) -> Region:
        """Let peers reach this file, or device memory, which is ours to close from now on."""
        return self._add(memoryview(b""), location, None, file)

    def register_private(self, view: memoryview, location: str) -> Region:
        """Have a region for our own transfers only, until `clear`."""
        region = Region(self.segment, self.generation, secrets.token_bytes(KEY_BYTES), len(view))
        with self._lock:
            self._entries[region.key] = RegionEntry(region, view, location, None, private=True)
            self._n_private += 1
        return region

    def _add(
        self, view: memoryview, location: str, fd: int | None, file: RegionBacking | None = None
    ) -> Region:
        key = secrets.token_bytes(KEY_BYTES)
        length = len(view) if file is None else file.length
        region = Region(self.segment, self.generation, key, length)
        with self._lock:
            self._entries[key] = RegionEntry(region, view, location, fd, file)
            if file is not None:
                self._files[key] = file
            watchers = list(self._watchers)
        try:
            for watcher in watchers:
                watcher()
        except BaseException:
            entry = self.remove(key)
            if entry is not None:
                self.discard(entry)
            raise
        return region

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this whenever a region was added; what it raises takes the region back."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Call it no more."""
        with self._lock:
            self._watchers.remove(watcher)

    def entries(self) -> list[RegionEntry]:
        """All regions in memory, in the order in which they were registered; no files."""
        with self._lock:
            return [
                entry
                for entry in self._entries.values()
                if entry.file is None and not entry.private
            ]

    def visit(self, keys: Iterable[bytes], visitor: Callable[[bytes, memoryview], None]) -> None:
        """Show those of these keys that are regions in memory, none of which is removed meanwhile.

        The visitor is called with key and bytes; it must be quick.
        """
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.file is None and not entry.private:
                    visitor(key, entry.view)

    def remove(self, key: bytes) -> RegionEntry | None:
        """Take the key away; the caller then waits with `wait_until_idle` and calls `discard`."""
        with self._lock:
            return self._entries.pop(key, None)

    def wait_until_idle(self, entry: RegionEntry, timeout_s: float) -> bool:
        """Wait for the last access to a removed region; whether it ended in time."""
        with self._quiet:
            return self._quiet.wait_for(lambda: entry.n_leases == 0, timeout_s)

    def discard(self, entry: RegionEntry) -> None:
        """Let go of the memory; it is freed with the last view of it.

        Not before `wait_until_idle`: an access that is still lent settles with its file.
        """
        with self._lock:
            self._files.pop(entry.region.key, None)
        if entry.fd is not None:
            os.close(entry.fd)
            entry.fd = None
        if entry.file is not None:
            entry.file.close()
            entry.file = None

    def clear(self) -> list[RegionEntry]:
        """Take all keys away."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
            self._n_private = 0
        self._file_pool.close()
        return entries

    @contextmanager
    def lease(
        self, generation: int, key: bytes, offset: int, length: int, *, write: bool
    ) -> Generator[memoryview]:
        """These bytes of a region, while the block runs.

        Raises:
            Refused: unknown key, another generation, out of bounds, or not writable.
        """
        entry, view = self.acquire(generation, key, offset, length, write=write)
        try:
            if entry.file is None:
                yield view
            else:
                with entry.file.lent(offset, length) as room:
                    yield room
        finally:
            self.give_back(entry)

    def acquire(
        self, generation: int, key: bytes, offset: int, length: int, *, write: bool
    ) -> tuple[RegionEntry, memoryview]:
        """Like `lease`, for those who call `give_back` themselves; a file has no bytes here."""
        with self._lock:
            entry = self._find(generation, key)
            if offset < 0 or length < 0 or offset + length > entry.region.length:
                raise AccessRefused(AccessStatus.OUT_OF_BOUNDS, entry.region.length)
            if write and (entry.view.readonly if entry.file is None else not entry.file.writable):
                raise AccessRefused(AccessStatus.READ_ONLY)
            entry.n_leases += 1
        return entry, entry.view[offset : offset + length]

    def give_back(self, entry: RegionEntry) -> None:
        """End an access."""
        with self._quiet:
            entry.n_leases -= 1
            if entry.n_leases == 0:
                self._quiet.notify_all()

    @property
    def has_files(self) -> bool:
        """Whether `load` and `store` have anything to do."""
        return bool(self._files)

    def is_file(self, key: bytes) -> bool:
        """Whether this key is that of a file, or of device memory."""
        return key in self._files

    def is_stageable(self, key: bytes) -> bool:
        """Whether this key is that of device memory."""
        file = self._files.get(key)
        return file is not None and file.stageable

    def load(self, spots: Mapping[int, RegionSpan]) -> dict[int, AccessRefused]:
        """Before leased bytes are read: fetch what is elsewhere. The caller holds the leases.

        Returns:
            Those that can't be read.
        """
        return self._settle(spots, _load)

    def store(self, spots: Mapping[int, RegionSpan]) -> dict[int, AccessRefused]:
        """After leased bytes were written, and before that is acknowledged: put it there.

        Returns:
            Those that can't be written.
        """
        return self._settle(spots, _store)

    def _settle(
        self,
        spots: Mapping[int, RegionSpan],
        move: Callable[[RegionBacking, int, memoryview], None],
    ) -> dict[int, AccessRefused]:
        jobs = {
            index: partial(move, file, spot.offset, spot.view)
            for index, spot in spots.items()
            if (file := self._files.get(spot.key)) is not None
        }
        return {index: _file_refusal(error) for index, error in self._file_pool.run(jobs).items()}

    def share(self, generation: int, key: bytes) -> tuple[int, int]:
        """A new file descriptor of a region's memory, the caller's to close, and its length.

        Raises:
            Refused: unknown key, another generation, or not shareable.
        """
        with self._lock:
            entry = self._find(generation, key)
            if entry.fd is None:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            return os.dup(entry.fd), len(entry.view)

    def lend(self, generation: int, key: bytes) -> RegionEntry:
        """A region in memory that this host's processes reach but can't map.

        It is an access, as those of `acquire`; the caller ends it with `give_back`.

        Raises:
            Refused: unknown key, another generation, or not in this process's memory.
        """
        with self._lock:
            entry = self._in_memory(generation, key)
            if not entry.view:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            entry.n_leases += 1
            return entry

    def _find(self, generation: int, key: bytes) -> RegionEntry:
        if generation != self.generation:
            raise AccessRefused(AccessStatus.OTHER_GENERATION, self.generation)
        entry = self._entries.get(key)
        if entry is None:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        return entry

    def _in_memory(self, generation: int, key: bytes) -> RegionEntry:
        entry = self._find(generation, key)
        if entry.file is not None:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def local(self, region: Region) -> RegionExtent:
        """How much one of our regions is, as the local side of a transfer.

        Raises:
            Refused: it is not one of ours, or a file.
        """
        with self._lock:
            entry = self._find_local(region)
            if entry.file is not None:
                return RegionExtent(entry.file.length, entry.file.writable)
            return RegionExtent(len(entry.view), not entry.view.readonly)

    def _find_local(self, region: Region) -> RegionEntry:
        if region.segment != self.segment:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        entry = self._find(region.generation, region.key)
        if entry.file is not None and not entry.file.stageable:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def location(self, key: bytes) -> str:
        """Where the bytes of one of our regions are; anywhere, when it is gone."""
        with self._lock:
            entry = self._entries.get(key)
            return "*" if entry is None else entry.location

    def acquire_entries(self, regions: Iterable[Region]) -> list[RegionEntry]:
        """Some of our regions, in memory or on devices, until `release_all`.

        Raises:
            Refused: one of them is not ours (any more), or a file.
        """
        with self._lock:
            entries = [self._find_local(each) for each in regions]
            for entry in entries:
                entry.n_leases += 1
        return entries

    @contextmanager
    def lease_entries(self, regions: Iterable[Region]) -> Generator[list[RegionEntry]]:
        """The same while the block runs; a context costs more than a small copy.

        Raises:
            Refused: one of them is not ours (any more), or a file.
        """
        entries = self.acquire_entries(regions)
        try:
            yield entries
        finally:
            self.release_all(entries)

    @contextmanager
    def lease_batch(
        self, generation: int, spans: Sequence[tuple[bytes, int, int]], *, write: bool
    ) -> Generator[list["memoryview | AccessRefused"]]:
        """Many accesses under one lock: (key, offset, length) each.

        Gives for each its bytes, or why not; never raises `AccessRefused`. Bytes of a file are lent
        room, see `load` and `store`.
        """
        held: dict[bytes, RegionEntry | AccessRefused] = {}
        files: dict[bytes, RegionBacking] = {}
        with self._lock:
            for key in {key for key, _, _ in spans}:
                try:
                    entry = self._find(generation, key)
                except AccessRefused as refused:
                    held[key] = refused
                    continue
                held[key] = entry
                if entry.file is not None:
                    files[key] = entry.file
            views = [
                _allowed(held[key], offset, length, write=write) for key, offset, length in spans
            ]
            entries = [entry for entry in held.values() if isinstance(entry, RegionEntry)]
            for entry in entries:
                entry.n_leases += 1
        try:
            if not files:
                yield views
                return
            with ExitStack() as rooms:
                for index, (key, offset, length) in enumerate(spans):
                    if key in files and not isinstance(views[index], AccessRefused):
                        views[index] = rooms.enter_context(files[key].lent(offset, length))
                yield views
        finally:
            self.release_all(entries)

    def acquire_local(
        self, pieces: Iterable[Piece], *, write: bool
    ) -> tuple[list[RegionEntry], tuple[memoryview, ...]]:
        """The bytes of each piece here, for those who call `release_all` themselves.

        Raises:
            Refused: a region is not ours (any more) or not in memory that can be lent
                without a copy, out of bounds, or not writable.
        """
        entries, views = [], []
        with self._lock:
            for piece in pieces:
                entry, offset = self._find_local(piece.local), piece.local_offset
                if entry.file is not None:
                    raise AccessRefused(AccessStatus.NOT_SHAREABLE)
                view = entry.view[offset : offset + piece.length] if offset >= 0 else None
                if view is None or len(view) != piece.length:
                    raise AccessRefused(AccessStatus.OUT_OF_BOUNDS, entry.region.length)
                if write and view.readonly:
                    raise AccessRefused(AccessStatus.READ_ONLY)
                entries.append(entry)
                views.append(view)
            for entry in entries:
                entry.n_leases += 1
        return entries, tuple(views)

    def release_all(self, entries: Sequence[RegionEntry]) -> None:
        """End accesses to these."""
        with self._quiet:
            for entry in entries:
                entry.n_leases -= 1
                if entry.n_leases == 0:
                    self._quiet.notify_all()

    def view(self, generation: int, key: bytes) -> memoryview:
        """All bytes of a region, read-only, for as long as the caller likes.

        Raises:
            Refused: unknown key, another generation, or a file.
        """
        with self._lock:
            return self._in_memory(generation, key).view.toreadonly()

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            for key, entry in self._entries.items():
                length = len(entry.view) if entry.file is None else entry.file.length
                assert entry.region.key == key and entry.region.length == length
                assert entry.n_leases >= 0
            for key, entry in self._entries.items():
                assert self._files.get(key) is entry.file


def _allowed(
    held: RegionEntry | AccessRefused, offset: int, length: int, *, write: bool
) -> memoryview | AccessRefused:
    """These bytes of a region that is leased, or why not; a file has no bytes here."""
    if isinstance(held, AccessRefused):
        return held
    if offset < 0 or length < 0 or offset + length > held.region.length:
        return AccessRefused(AccessStatus.OUT_OF_BOUNDS, held.region.length)
    if write and (held.view.readonly if held.file is None else not held.file.writable):
        return AccessRefused(AccessStatus.READ_ONLY)
    return held.view[offset : offset + length]


def _load(file: RegionBacking, offset: int, view: memoryview) -> None:
    file.load(offset, view)


def _store(file: RegionBacking, offset: int, view: memoryview) -> None:
    file.store(offset, view)


def _file_refusal(error: Exception) -> AccessRefused:
    if isinstance(error, DeviceError):
        return AccessRefused(AccessStatus.DEVICE_FAILED, error.code)
    if isinstance(error, FileShrunk):
        return AccessRefused(AccessStatus.FILE_SHRUNK, error.n_bytes)
    number = error.errno if isinstance(error, OSError) else None
    return AccessRefused(AccessStatus.FILE_FAILED, number or errno.EIO)
