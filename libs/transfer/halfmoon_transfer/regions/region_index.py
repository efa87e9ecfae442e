"""Keep the entries of one segment by their keys."""

import threading
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from halfmoon_protocol.regions import Region
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_backing import RegionBacking


class RegionEntry:
    """One registered buffer, file or range of device memory."""

    def __init__(
        self,
        region: Region,
        view: memoryview,
        location: str,
        *,
        fd: int | None = None,
        backing: RegionBacking | None = None,
        private: bool = False,
    ) -> None:
        self.region = region
        self.n_bytes = region.length
        #: The bytes; empty for a file or device memory.
        self.view = view
        self.writable = not view.readonly if backing is None else backing.writable
        #: Location of the bytes, by which a topology chooses devices: "cpu:0", "*".
        self.location = location
        #: The memfd of memory that we allocated, ours to close; None for memory of the caller.
        self.fd = fd
        #: The file or device memory behind the region, ours to close.
        self.backing = backing
        #: Used by our own transfers only; peers are never told of it.
        self.private = private
        #: Accesses that are going on.
        self.n_leases = 0

    @cached_property
    def address(self) -> int:
        """Address of the first byte in this process's memory."""
        return int(np.frombuffer(self.view, np.uint8).__array_interface__["data"][0])


class RegionIndex:
    """The regions of one start of a segment, by key. Lookups need `lock`, as each says."""

    def __init__(self, segment: str, generation: int) -> None:
        self.segment = segment
        self.generation = generation
        #: Guards the entries and their `n_leases`.
        self.lock = threading.Lock()
        self._entries: dict[bytes, RegionEntry] = {}
        #: How many of the entries are private.
        self._n_private = 0

    def __len__(self) -> int:
        return len(self._entries) - self._n_private

    def add(self, entry: RegionEntry) -> None:
        """Make a region known under its key."""
        with self.lock:
            self._entries[entry.region.key] = entry
            self._n_private += entry.private

    def remove(self, key: bytes) -> RegionEntry | None:
        """Take the key away; later accesses are refused. Accesses that are going on continue."""
        with self.lock:
            return self._entries.pop(key, None)

    def clear(self) -> list[RegionEntry]:
        """Take all keys away."""
        with self.lock:
            entries = list(self._entries.values())
            self._entries.clear()
            self._n_private = 0
        return entries

    def find(self, generation: int, key: bytes) -> RegionEntry:
        """Return the region that a peer names; the caller holds `lock`.

        Raises:
            AccessRefused: unknown key, or another generation.
        """
        if generation != self.generation:
            raise AccessRefused(AccessStatus.OTHER_GENERATION, self.generation)
        entry = self._entries.get(key)
        if entry is None:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        return entry

    def find_in_memory(self, generation: int, key: bytes) -> RegionEntry:
        """Return a region whose bytes are in this process's memory; the caller holds `lock`.

        Raises:
            AccessRefused: unknown key, another generation, or a file or device memory.
        """
        entry = self.find(generation, key)
        if entry.backing is not None:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def find_local(self, region: Region) -> RegionEntry:
        """Return one of our regions as the local side of a transfer; the caller holds `lock`.

        Raises:
            AccessRefused: it is not registered here (any more), or a file.
        """
        if region.segment != self.segment:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        entry = self.find(region.generation, region.key)
        if entry.backing is not None and not entry.backing.stageable:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def entries(self) -> list[RegionEntry]:
        """Return the regions in memory, in the order of registration; no files."""
        with self.lock:
            return [
                entry
                for entry in self._entries.values()
                if entry.backing is None and not entry.private
            ]

    def visit(self, keys: Iterable[bytes], visitor: Callable[[bytes, memoryview], None]) -> None:
        """Pass key and bytes of each named region in memory to a visitor.

        No region is removed meanwhile, so the visitor must be quick.
        """
        with self.lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.backing is None and not entry.private:
                    visitor(key, entry.view)

    def location(self, key: bytes) -> str:
        """Return where a region's bytes are; "*" (anywhere) for one that is gone."""
        with self.lock:
            entry = self._entries.get(key)
            return "*" if entry is None else entry.location

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self.lock:
            for key, entry in self._entries.items():
                length = len(entry.view) if entry.backing is None else entry.backing.length
                assert entry.region.key == key and entry.n_bytes == length
                assert entry.n_leases >= 0
