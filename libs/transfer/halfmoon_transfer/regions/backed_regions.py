"""Move bytes between lent buffers and the files or device memory behind regions."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.regions.file_thread_pool import FileThreadPool
from halfmoon_transfer.regions.region_backing import RegionBacking


class RegionSpan(NamedTuple):
    """A range of one of our regions, and the memory that holds its bytes during an access."""

    key: bytes
    offset: int
    view: memoryview


class BackedRegions:
    """The backings of one segment's regions, by key. All methods are safe from any thread."""

    def __init__(self, segment: str) -> None:
        self._lock = threading.Lock()
        #: From registration until the region is discarded.
        self._backings: dict[bytes, RegionBacking] = {}
        self._pool = FileThreadPool(f"halfmoon-transfer-{segment}-file")

    def __bool__(self) -> bool:
        """Return whether `load` and `store` have anything to do."""
        return bool(self._backings)

    def __contains__(self, key: bytes) -> bool:
        return key in self._backings

    def add(self, key: bytes, backing: RegionBacking) -> None:
        """Make a region's backing known."""
        with self._lock:
            self._backings[key] = backing

    def discard(self, key: bytes) -> None:
        """Forget a region's backing; no access to it is going on."""
        with self._lock:
            self._backings.pop(key, None)

    def is_stageable(self, key: bytes) -> bool:
        """Return whether this is the key of device memory."""
        backing = self._backings.get(key)
        return backing is not None and backing.stageable

    def load(self, spans: Mapping[int, RegionSpan]) -> dict[int, AccessRefused]:
        """Fill the buffers of leased spans before their bytes are read.

        Returns:
            The spans that can't be read.
        """
        return self._run(spans, lambda backing, span: partial(backing.load, span.offset, span.view))

    def store(self, spans: Mapping[int, RegionSpan]) -> dict[int, AccessRefused]:
        """Write the buffers of leased spans back before the write is acknowledged.

        Returns:
            The spans that can't be written.
        """
        return self._run(
            spans, lambda backing, span: partial(backing.store, span.offset, span.view)
        )

    def _run(
        self,
        spans: Mapping[int, RegionSpan],
        job: Callable[[RegionBacking, RegionSpan], Callable[[], None]],
    ) -> dict[int, AccessRefused]:
        backings = {
            index: backing
            for index, span in spans.items()
            if (backing := self._backings.get(span.key)) is not None
        }
        jobs = {index: job(backing, spans[index]) for index, backing in backings.items()}
        failed = self._pool.run(jobs)
        return {index: backings[index].refusal(error) for index, error in failed.items()}

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
