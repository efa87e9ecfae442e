"""The memory that an engine lets its peers reach: registered, keyed, bounds-checked.

The owner decides here, for every path alike, whether an access is allowed. An access takes
a lease on its region; `RegionTable.remove` takes the key away first and then waits for the
leases that were given, so whoever unregisters memory may use it for something else.
(A peer that mapped shared memory holds no lease: it is told, see `backends.shm`.)
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import IntEnum

import msgspec

from halfmoon_protocol.regions import KEY_BYTES, Region


class Status(IntEnum):
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


class Refused(Exception):
    """The owner does not allow an access."""

    def __init__(self, status: Status, detail: int = 0) -> None:
        super().__init__(status.name)
        self.status = status
        self.detail = detail


class Memory(msgspec.Struct, frozen=True):
    """Shareable memory that an engine made: its region, and this process's view of it."""

    region: Region
    #: Writable; the memory lives as long as the engine or any view of it.
    view: memoryview


class Entry:
    """One registered buffer."""

    def __init__(self, region: Region, view: memoryview, location: str, fd: int | None) -> None:
        self.region = region
        self.view = view
        #: Where the bytes are: "cpu:0", "*"; what a topology chooses devices by.
        self.location = location
        #: The memfd behind it, ours to close; none for memory that somebody else made.
        self.fd = fd
        #: Accesses going on.
        self.n_leases = 0


class RegionTable:
    """All regions of one segment."""

    def __init__(self, segment: str, generation: int) -> None:
        self.segment = segment
        self.generation = generation
        self._entries: dict[bytes, Entry] = {}
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._entries)

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

    def _add(self, view: memoryview, location: str, fd: int | None) -> Region:
        key = secrets.token_bytes(KEY_BYTES)
        region = Region(self.segment, self.generation, key, len(view))
        with self._lock:
            self._entries[key] = Entry(region, view, location, fd)
        return region

    def remove(self, key: bytes) -> Entry | None:
        """Take the key away; the caller then waits with `wait_quiet` and calls `discard`."""
        with self._lock:
            return self._entries.pop(key, None)

    def wait_quiet(self, entry: Entry, timeout_s: float) -> bool:
        """Wait for the last access to a removed region; whether it ended in time."""
        with self._quiet:
            return self._quiet.wait_for(lambda: entry.n_leases == 0, timeout_s)

    @staticmethod
    def discard(entry: Entry) -> None:
        """Let go of the memory; it is freed with the last view of it."""
        if entry.fd is not None:
            os.close(entry.fd)
            entry.fd = None

    def clear(self) -> list[Entry]:
        """Take all keys away."""
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
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
            yield view
        finally:
            self.give_back(entry)

    def acquire(
        self, generation: int, key: bytes, offset: int, length: int, *, write: bool
    ) -> tuple[Entry, memoryview]:
        """Like `lease`, for those who call `give_back` themselves."""
        with self._lock:
            entry = self._find(generation, key)
            if offset < 0 or length < 0 or offset + length > len(entry.view):
                raise Refused(Status.OUT_OF_BOUNDS, len(entry.view))
            if write and entry.view.readonly:
                raise Refused(Status.READ_ONLY)
            entry.n_leases += 1
        return entry, entry.view[offset : offset + length]

    def give_back(self, entry: Entry) -> None:
        """End an access."""
        with self._quiet:
            entry.n_leases -= 1
            if entry.n_leases == 0:
                self._quiet.notify_all()

    def share(self, generation: int, key: bytes) -> tuple[int, int]:
        """A new file descriptor of a region's memory, the caller's to close, and its length.

        Raises:
            Refused: unknown key, another generation, or not shareable.
        """
        with self._lock:
            entry = self._find(generation, key)
            if entry.fd is None:
                raise Refused(Status.NOT_SHAREABLE)
            return os.dup(entry.fd), len(entry.view)

    def _find(self, generation: int, key: bytes) -> Entry:
        if generation != self.generation:
            raise Refused(Status.OTHER_GENERATION, self.generation)
        entry = self._entries.get(key)
        if entry is None:
            raise Refused(Status.UNKNOWN_KEY)
        return entry

    def local(self, region: Region) -> memoryview:
        """All bytes of one of our regions, to look at their length and kind.

        Raises:
            Refused: it is not one of ours.
        """
        with self._lock:
            return self._find_local(region).view

    def _find_local(self, region: Region) -> Entry:
        if region.segment != self.segment:
            raise Refused(Status.UNKNOWN_KEY)
        return self._find(region.generation, region.key)

    @contextmanager
    def lease_local(self, regions: Iterable[Region]) -> Generator[dict[bytes, memoryview]]:
        """All bytes of some of our regions, by key, while the block runs.

        Raises:
            Refused: one of them is not ours (any more).
        """
        with self._lock:
            entries = [self._find_local(each) for each in regions]
            for entry in entries:
                entry.n_leases += 1
        try:
            yield {entry.region.key: entry.view for entry in entries}
        finally:
            self._give_back(entries)

    @contextmanager
    def lease_batch(
        self, generation: int, spans: Sequence[tuple[bytes, int, int]], *, write: bool
    ) -> Generator[list["memoryview | Refused"]]:
        """Many accesses under one lock: (key, offset, length) each.

        Gives for each its bytes, or why not; never raises `Refused`.
        """
        held: dict[bytes, Entry | Refused] = {}
        with self._lock:
            for key in {key for key, _, _ in spans}:
                try:
                    entry = self._find(generation, key)
                except Refused as refused:
                    held[key] = refused
                else:
                    held[key] = entry
            entries = [entry for entry in held.values() if isinstance(entry, Entry)]
            for entry in entries:
                entry.n_leases += 1
        try:
            yield [_span(held[key], offset, length, write) for key, offset, length in spans]
        finally:
            self._give_back(entries)

    def _give_back(self, entries: Sequence[Entry]) -> None:
        with self._quiet:
            for entry in entries:
                entry.n_leases -= 1
                if entry.n_leases == 0:
                    self._quiet.notify_all()

    def view(self, generation: int, key: bytes) -> memoryview:
        """All bytes of a region, read-only, for as long as the caller likes.

        Raises:
            Refused: unknown key, or another generation.
        """
        with self._lock:
            return self._find(generation, key).view.toreadonly()

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            for key, entry in self._entries.items():
                assert entry.region.key == key and entry.region.length == len(entry.view)
                assert entry.n_leases >= 0


def _span(held: Entry | Refused, offset: int, length: int, write: bool) -> memoryview | Refused:
    """These bytes of a region that is leased, or why not."""
    if isinstance(held, Refused):
        return held
    if offset < 0 or length < 0 or offset + length > held.region.length:
        return Refused(Status.OUT_OF_BOUNDS, held.region.length)
    if write and held.view.readonly:
        return Refused(Status.READ_ONLY)
    return held.view[offset : offset + length]
