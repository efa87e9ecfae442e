"""Keep the entries of one segment by their keys."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property

import msgspec
import numpy as np

from halfmoon_protocol.regions import Region
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus, access_refusal
from halfmoon_transfer.regions.region_backing import RegionBacking
from halfmoon_transfer.regions.region_grant import RegionGrant


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
        grant: RegionGrant | None = None,
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
        #: What the key allows of `view`, which is another entry's; None for the region's own key.
        self.grant = grant
        #: Accesses that are going on.
        self.n_leases = 0

    def refusal(self, offset: int, length: int, *, write: bool, now: float) -> AccessRefused | None:
        """Return why an access is refused, or None if it is allowed."""
        refused = access_refusal(
            offset, length, write=write, n_bytes=self.n_bytes, writable=self.writable
        )
        if refused is not None or self.grant is None:
            return refused
        return self.grant.refusal(offset, length, write=write, now=now)

    @cached_property
    def address(self) -> int:
        """Address of the first byte in this process's memory."""
        return int(np.frombuffer(self.view, np.uint8).__array_interface__["data"][0])


class RegionIndex:
    """The regions of one start of a segment, by key. Lookups need `lock`, as each says."""

    def __init__(
        self, segment: str, generation: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.segment = segment
        self.generation = generation
        #: Tells the time by which grants end.
        self.now = now
        #: Guards the entries and their `n_leases`.
        self.lock = threading.Lock()
        self._entries: dict[bytes, RegionEntry] = {}
        #: How many of the entries are private.
        self._n_private = 0
        #: The entries that are grants, by key, each with the key of its region.
        self._grants: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._entries) - self._n_private - len(self._grants)

    def add(self, entry: RegionEntry) -> None:
        """Make a region known under its key."""
        with self.lock:
            self._entries[entry.region.key] = entry
            self._n_private += entry.private

    def remove(self, key: bytes) -> RegionEntry | None:
        """Take a region's key away; later accesses are refused.

        Accesses that are going on continue. Grants stay, see `remove_grants_of`.
        """
        with self.lock:
            return None if key in self._grants else self._entries.pop(key, None)

    def remove_grant(self, key: bytes) -> RegionEntry | None:
        """Take a grant's key away, like `remove`; leave the keys of regions alone."""
        with self.lock:
            if self._grants.pop(key, None) is None:
                return None
            return self._entries.pop(key)

    def remove_grants_of(self, entry: RegionEntry) -> list[RegionEntry]:
        """Take away the keys of a removed region's grants."""
        with self.lock:
            keys = [key for key, of in self._grants.items() if of == entry.region.key]
            for key in keys:
                del self._grants[key]
            return [self._entries.pop(key) for key in keys]

    def add_grant(self, region: Region, key: bytes, grant: RegionGrant, limit: int) -> Region:
        """Make a grant's key known, and return the region as its holder names it.

        Raises:
            AccessRefused: the region is not registered here (any more), a grant, or not in memory;
                or there are `limit` grants already.
        """
        with self.lock:
            parent = self.find_in_memory(region.generation, region.key)
            if len(self._grants) >= limit:
                raise AccessRefused(AccessStatus.NO_ROOM, limit)
            granted = msgspec.structs.replace(region, key=key)
            self._entries[key] = RegionEntry(granted, parent.view, parent.location, grant=grant)
            self._grants[key] = region.key
            return granted

    def extend_grant(self, key: bytes, expires_at: float) -> bool:
        """Let a grant end at another time; return whether there is such a grant."""
        with self.lock:
            entry = self._entries.get(key)
            if entry is None or entry.grant is None:
                return False
            entry.grant = entry.grant.until(expires_at)
            return True

    def clear(self) -> list[RegionEntry]:
        """Take all keys away."""
        with self.lock:
            entries = list(self._entries.values())
            self._entries.clear()
            self._grants.clear()
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
        """Return a region all of whose bytes are in this process's memory, for any use.

        The caller holds `lock`.

        Raises:
            AccessRefused: unknown key, another generation, a grant, or a file or device memory.
        """
        entry = self.find(generation, key)
        if entry.backing is not None or entry.grant is not None:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def find_local(self, region: Region) -> RegionEntry:
        """Return one of our regions as the local side of a transfer; the caller holds `lock`.

        Raises:
            AccessRefused: it is not registered here (any more), a grant, or a file.
        """
        if region.segment != self.segment:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        entry = self.find(region.generation, region.key)
        if entry.grant is not None:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        if entry.backing is not None and not entry.backing.stageable:
            raise AccessRefused(AccessStatus.NOT_SHAREABLE)
        return entry

    def entries(self) -> list[RegionEntry]:
        """Return the regions in memory, in the order of registration; no files."""
        with self.lock:
            return [
                entry
                for entry in self._entries.values()
                if entry.backing is None and not entry.private and entry.grant is None
            ]

    def visit(self, keys: Iterable[bytes], visitor: Callable[[bytes, memoryview], None]) -> None:
        """Pass key and bytes of each named region in memory to a visitor; no grants.

        No region is removed meanwhile, so the visitor must be quick.
        """
        with self.lock:
            for key in keys:
                entry = self._entries.get(key)
                if (
                    entry is not None
                    and entry.backing is None
                    and not entry.private
                    and entry.grant is None
                ):
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
            granted = {key for key, entry in self._entries.items() if entry.grant is not None}
            assert granted == self._grants.keys()
