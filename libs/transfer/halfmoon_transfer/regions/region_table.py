"""Register the memory that an engine lets its peers reach.

The owner decides here, for every path alike, which bytes a peer may reach. `leases` grants the
accesses; a region is removed first, then idle, then discarded:

    register -> remove (its key is refused) -> leases.wait_until_idle -> discard (it is freed)

A region that is a file (`file_region`) or memory of a device (`devices`) has no memory of its own
here. Accesses to it go through buffers, see `backed_regions`.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from halfmoon_protocol.regions import KEY_BYTES, Region
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.backed_regions import BackedRegions
from halfmoon_transfer.regions.region_backing import RegionBacking
from halfmoon_transfer.regions.region_grant import GrantedOps, RegionGrant
from halfmoon_transfer.regions.region_index import RegionEntry, RegionIndex
from halfmoon_transfer.regions.region_leases import RegionLeases
from halfmoon_transfer.regions.shared_memory import SharedMemory, allocate_shared

#: Grants of one segment, at most; one of each lease and landing.
MAX_GRANTS = 65_536


class SlicedBytes(Protocol):
    """Bytes that are read slice by slice: a view of memory, or a copy of a device's."""

    def __getitem__(self, part: slice, /) -> memoryview:
        """Return a slice."""
        ...


class PoolMemory(Protocol):
    """Registered memory of a pool, on the host or on a device."""

    @property
    def region(self) -> Region:
        """The region by which peers reach it."""
        ...

    @property
    def view(self) -> SlicedBytes:
        """The view of this process."""
        ...


class Memory(msgspec.Struct, frozen=True):
    """Shareable memory that an engine allocated: its region, and this process's view of it."""

    region: Region
    #: Writable; the memory lives as long as the engine or any view of it.
    view: memoryview


class RegionExtent(NamedTuple):
    """Length of a region in bytes, and whether it may be written."""

    length: int
    writable: bool


class RegionTable:
    """The regions of one start of a segment. All methods are safe from any thread."""

    def __init__(
        self, segment: str, generation: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.segment = segment
        self.generation = generation
        self.index = RegionIndex(segment, generation, now)
        self.leases = RegionLeases(self.index)
        self.backed = BackedRegions(segment)
        self._lock = threading.Lock()
        #: Called after a region was added, in the thread that adds it.
        self._watchers: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self.index)

    def allocate(self, n_bytes: int, location: str) -> Memory:
        """Allocate zeroed memory that other processes of this host can map, and register it.

        Raises:
            ValueError: `n_bytes` is less than 1.
            OSError: the system has no more memory or descriptors.
        """
        fd, view = allocate_shared(n_bytes)
        return Memory(self._add(RegionEntry(self._name(n_bytes), view, location, fd=fd)), view)

    def register_shared(self, shared: SharedMemory, location: str) -> Memory:
        """Register memory that other processes of this host can map; it stays the caller's.

        Raises:
            OSError: the system has no more descriptors.
        """
        fd, view = os.dup(shared.fd), shared.view
        return Memory(self._add(RegionEntry(self._name(len(view)), view, location, fd=fd)), view)

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
        return self._add(RegionEntry(self._name(buffer.nbytes), buffer.cast("B"), location))

    def register_backed(self, backing: RegionBacking, location: str) -> Region:
        """Let peers reach this file or device memory, which is ours to close from now on."""
        region = self._name(backing.length)
        return self._add(RegionEntry(region, memoryview(b""), location, backing=backing))

    def register_private(self, view: memoryview, location: str) -> Region:
        """Register a region for our own transfers only, until `clear`."""
        region = self._name(len(view))
        self.index.add(RegionEntry(region, view, location, private=True))
        return region

    def _name(self, n_bytes: int) -> Region:
        """Make a region's descriptor, with a key that can't be guessed."""
        return Region(self.segment, self.generation, secrets.token_bytes(KEY_BYTES), n_bytes)

    def _add(self, entry: RegionEntry) -> Region:
        if entry.backing is not None:
            self.backed.add(entry.region.key, entry.backing)
        self.index.add(entry)
        with self._lock:
            watchers = list(self._watchers)
        try:
            for watcher in watchers:
                watcher()
        except BaseException:
            if self.remove(entry.region.key) is not None:
                self.discard(entry)
            raise
        return entry.region

    def grant(
        self, region: Region, ranges: Iterable[tuple[int, int]], op: GrantedOps, ttl_s: float
    ) -> Region:
        """Make a new key for some ranges of a region, which `remove` takes away.

        Raises:
            ValueError: no range, or one that is empty or not within the region.
            AccessRefused: the region is not ours (any more), or not in memory; or there are
                `MAX_GRANTS` grants.
        """
        allowed = RegionGrant(ranges, op, region.length, self.index.now() + ttl_s)
        return self.index.add_grant(region, secrets.token_bytes(KEY_BYTES), allowed, MAX_GRANTS)

    def extend_grant(self, granted: Region, ttl_s: float) -> bool:
        """Let a grant end so many seconds from now; return whether there is such a grant."""
        return self.index.extend_grant(granted.key, self.index.now() + ttl_s)

    def is_in_memory(self, region: Region) -> bool:
        """Return whether a region is registered here, in memory of the host, and no grant."""
        with self.index.lock:
            try:
                self.index.find_in_memory(region.generation, region.key)
            except AccessRefused:
                return False
            return True

    def add_watcher(self, watcher: Callable[[], None]) -> None:
        """Call this whenever a region was added; if it raises, the region is removed again."""
        with self._lock:
            self._watchers.append(watcher)

    def remove_watcher(self, watcher: Callable[[], None]) -> None:
        """Stop calling a watcher."""
        with self._lock:
            self._watchers.remove(watcher)

    def remove(self, key: bytes) -> RegionEntry | None:
        """Take the key away; the caller waits until the entry is idle, then calls `discard`."""
        return self.index.remove(key)

    def discard(self, entry: RegionEntry) -> None:
        """Release the memory of a removed region; it is freed with the last view of it.

        The caller has waited for the accesses: one that is going on may still need the backing.
        """
        self.backed.discard(entry.region.key)
        if entry.fd is not None:
            os.close(entry.fd)
            entry.fd = None
        if entry.backing is not None:
            entry.backing.close()
            entry.backing = None

    def clear(self) -> list[RegionEntry]:
        """Take all keys away and return the entries, for `discard`."""
        entries = self.index.clear()
        self.backed.close()
        return entries

    def local_extent(self, region: Region) -> RegionExtent:
        """Return the extent of one of our regions, as the local side of a transfer.

        Raises:
            AccessRefused: it is not registered here (any more), or a file.
        """
        with self.index.lock:
            entry = self.index.find_local(region)
            return RegionExtent(entry.n_bytes, entry.writable)

    def duplicate_fd(self, generation: int, key: bytes) -> tuple[int, int]:
        """Return a new descriptor of a region's memory, the caller's to close, and its length.

        Raises:
            AccessRefused: unknown key, another generation, or not shareable.
        """
        with self.index.lock:
            entry = self.index.find(generation, key)
            if entry.fd is None:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            return os.dup(entry.fd), len(entry.view)

    def view(self, generation: int, key: bytes) -> memoryview:
        """Return all bytes of a region, read-only, for as long as the caller likes.

        Raises:
            AccessRefused: unknown key, another generation, or a file or device memory.
        """
        with self.index.lock:
            return self.index.find_in_memory(generation, key).view.toreadonly()

    def check(self) -> None:
        """Assert what must hold between calls."""
        self.index.check()
