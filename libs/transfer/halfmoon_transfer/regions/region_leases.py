"""Grant accesses to regions, and wait for their end before a region is freed.

An access takes a lease on its region. `RegionTable.remove` takes the key away first;
`wait_until_idle` then waits for the leases that were given. After that the memory may be used for
something else. (A peer that mapped shared memory holds no lease; see `backends.shm`.)

A lease on a file or on device memory lends a buffer. `BackedRegions.load` fills it before its bytes
are read, and `BackedRegions.store` writes it back before a write is acknowledged.
"""

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager

from halfmoon_protocol.regions import Region
from halfmoon_transfer.interface import Piece
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_backing import RegionBacking
from halfmoon_transfer.regions.region_index import RegionEntry, RegionIndex


class RegionLeases:
    """The accesses to one segment's regions. All methods are safe from any thread."""

    def __init__(self, index: RegionIndex) -> None:
        self._index = index
        self._lock = index.lock
        self._idle = threading.Condition(index.lock)

    # Accesses of peers.

    def acquire(
        self, generation: int, key: bytes, offset: int, length: int, *, write: bool
    ) -> tuple[RegionEntry, memoryview]:
        """Begin an access, which `release` ends; a file or device memory has no bytes here.

        Raises:
            AccessRefused: unknown key, another generation, out of bounds, or not writable;
                or a grant that does not allow it.
        """
        with self._lock:
            entry = self._index.find(generation, key)
            refused = entry.refusal(offset, length, write=write, now=self._index.now())
            if refused is not None:
                raise refused
            entry.n_leases += 1
        return entry, entry.view[offset : offset + length]

    @contextmanager
    def lease(
        self, generation: int, key: bytes, offset: int, length: int, *, write: bool
    ) -> Generator[memoryview]:
        """Lend these bytes of a region while the block runs; raises like `acquire`."""
        entry, view = self.acquire(generation, key, offset, length, write=write)
        try:
            if entry.backing is None:
                yield view
            else:
                with entry.backing.lend_buffer(offset, length) as buffer:
                    yield buffer
        finally:
            self.release(entry)

    @contextmanager
    def lease_batch(
        self, generation: int, spans: Sequence[tuple[bytes, int, int]], *, write: bool
    ) -> Generator[list["memoryview | AccessRefused"]]:
        """Lend many ranges under one lock, each named by key, offset and length.

        Yields each range's bytes, or why it is refused; never raises `AccessRefused`. The bytes of
        a file or of device memory are a lent buffer, see `BackedRegions`.
        """
        found: dict[bytes, RegionEntry | AccessRefused] = {}
        backings: dict[bytes, RegionBacking] = {}
        with self._lock:
            for key in {key for key, _, _ in spans}:
                try:
                    entry = self._index.find(generation, key)
                except AccessRefused as refused:
                    found[key] = refused
                    continue
                found[key] = entry
                if entry.backing is not None:
                    backings[key] = entry.backing
            now = self._index.now()
            views = [
                _bytes_of(found[key], offset, length, write=write, now=now)
                for key, offset, length in spans
            ]
            entries = [entry for entry in found.values() if isinstance(entry, RegionEntry)]
            for entry in entries:
                entry.n_leases += 1
        try:
            if not backings:
                yield views
                return
            with ExitStack() as buffers:
                for index, (key, offset, length) in enumerate(spans):
                    if key in backings and not isinstance(views[index], AccessRefused):
                        lent = backings[key].lend_buffer(offset, length)
                        views[index] = buffers.enter_context(lent)
                yield views
        finally:
            self.release_all(entries)

    def acquire_whole(self, generation: int, key: bytes) -> RegionEntry:
        """Begin an access to all of a region in memory, by a process that can't map it.

        Raises:
            AccessRefused: unknown key, another generation, or not in this process's memory.
        """
        with self._lock:
            entry = self._index.find_in_memory(generation, key)
            if not entry.view:
                raise AccessRefused(AccessStatus.NOT_SHAREABLE)
            entry.n_leases += 1
            return entry

    # Accesses of our own transfers.

    def acquire_regions(self, regions: Iterable[Region]) -> list[RegionEntry]:
        """Begin accesses to some of our regions, which `release_all` ends.

        Raises:
            AccessRefused: one of them is not registered here (any more), or a file.
        """
        with self._lock:
            entries = [self._index.find_local(each) for each in regions]
            for entry in entries:
                entry.n_leases += 1
        return entries

    @contextmanager
    def lease_regions(self, regions: Iterable[Region]) -> Generator[list[RegionEntry]]:
        """Begin accesses to some of our regions and end them with the block.

        Raises:
            AccessRefused: one of them is not registered here (any more), or a file.
        """
        entries = self.acquire_regions(regions)
        try:
            yield entries
        finally:
            self.release_all(entries)

    def acquire_local(
        self, pieces: Iterable[Piece], *, write: bool
    ) -> tuple[list[RegionEntry], tuple[memoryview, ...]]:
        """Begin accesses to the local bytes of each piece, which `release_all` ends.

        Raises:
            AccessRefused: a region is not registered here (any more), a file or device memory,
                out of bounds, or not writable.
        """
        entries, views = [], []
        with self._lock:
            now = self._index.now()
            for piece in pieces:
                entry = self._index.find_local(piece.local)
                if entry.backing is not None:
                    raise AccessRefused(AccessStatus.NOT_SHAREABLE)
                start, length = piece.local_offset, piece.length
                refused = entry.refusal(start, length, write=write, now=now)
                if refused is not None:
                    raise refused
                entries.append(entry)
                views.append(entry.view[start : start + length])
            for entry in entries:
                entry.n_leases += 1
        return entries, tuple(views)

    # The end of accesses.

    def release(self, entry: RegionEntry) -> None:
        """End an access."""
        with self._idle:
            entry.n_leases -= 1
            if entry.n_leases == 0:
                self._idle.notify_all()

    def release_all(self, entries: Sequence[RegionEntry]) -> None:
        """End one access to each of these regions."""
        with self._idle:
            for entry in entries:
                entry.n_leases -= 1
                if entry.n_leases == 0:
                    self._idle.notify_all()

    def is_idle(self, entry: RegionEntry) -> bool:
        """Return whether no access to a removed region goes on."""
        with self._lock:
            return entry.n_leases == 0

    def wait_until_idle(self, entry: RegionEntry, timeout_s: float) -> bool:
        """Wait for the last access to a removed region; return whether it ended in time."""
        with self._idle:
            return self._idle.wait_for(lambda: entry.n_leases == 0, timeout_s)


def _bytes_of(
    found: RegionEntry | AccessRefused, offset: int, length: int, *, write: bool, now: float
) -> memoryview | AccessRefused:
    """Return these bytes of a region, or why not; a file or device memory has no bytes here."""
    if isinstance(found, AccessRefused):
        return found
    refused = found.refusal(offset, length, write=write, now=now)
    return found.view[offset : offset + length] if refused is None else refused
