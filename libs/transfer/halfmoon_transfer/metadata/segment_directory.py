"""Look up and cache peers' segment descriptors, and publish our own."""

import logging
import threading

from halfmoon_metadata.start_counter import ImplausibleGeneration, count_start
from halfmoon_metadata.store_interface import MetadataError, MetadataStore
from halfmoon_transfer.interface import Lost, Rejected, TransferError
from halfmoon_transfer.metadata import descriptor as records
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor

_log = logging.getLogger(__name__)
_MAX_PUBLISH_TRIES = 8


class SegmentDirectory:
    """Descriptors by segment name. Calls may block on the store, but for `cached`."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._cache: dict[str, SegmentDescriptor] = {}
        #: Descriptors of peers that have no record in the store.
        self._introduced: dict[str, SegmentDescriptor] = {}
        self._lock = threading.Lock()

    def cached(self, segment: str, generation: int) -> SegmentDescriptor | None:
        """Return the cached descriptor of this start of a segment, or None."""
        known = self._introduced.get(segment) or self._cache.get(segment)
        return known if known is not None and known.generation == generation else None

    def resolve(
        self, segment: str, generation: int, *, fresh: bool
    ) -> tuple[SegmentDescriptor, bool]:
        """Return the descriptor of this start of a segment, and True if it has changed.

        Raises:
            Rejected: the segment is of another generation.
            Lost: there is no such segment, or the store fails.
        """
        known = self.cached(segment, generation)
        if known is not None and (not fresh or segment in self._introduced):
            return known, False
        if segment in self._introduced:
            raise _other_generation(self._introduced[segment], generation)
        try:
            value = self._store.get(records.PREFIX + segment)
        except MetadataError as error:
            raise Lost(f"segment {segment} can't be looked up: {error}") from error
        if value is None:
            self.forget(segment)
            raise Lost(f"segment {segment} is not in the metadata store (any more)")
        try:
            found = records.decode(value)
        except ValueError as error:
            raise Lost(f"the record of segment {segment} is broken: {error}") from error
        with self._lock:
            self._cache[segment] = found
        if found.generation != generation:
            raise _other_generation(found, generation)
        return found, found != known

    def forget(self, segment: str) -> None:
        """Drop a segment's descriptor, so that the next lookup asks the store."""
        with self._lock:
            self._cache.pop(segment, None)
            self._introduced.pop(segment, None)

    def introduce(self, peer: SegmentDescriptor) -> None:
        """Add a peer that is in no store of ours, until `forget`."""
        with self._lock:
            self._introduced[peer.name] = peer

    def next_generation(self, segment: str) -> int:
        """Count one more start of a segment, and return its generation.

        It is above that of the record that is there, which may outlive a lost counter.
        """
        key = records.PREFIX + segment
        record = self._store.get(key)
        there = {key: 0 if record is None else _generation_of(record)}
        try:
            return count_start(self._store, records.GENERATIONS + segment, there)
        except ImplausibleGeneration as error:
            raise Rejected(str(error)) from None

    def publish(self, own: SegmentDescriptor, ttl_s: float) -> None:
        """Write our record over that of any earlier start, or renew it.

        Args:
            own: our descriptor.
            ttl_s: seconds after which the record expires unless published again.

        Raises:
            Rejected: a later start of this segment is published already.
            TransferError: other processes keep changing the record.
            MetadataError: the store fails.
        """
        key = records.PREFIX + own.name
        for _ in range(_MAX_PUBLISH_TRIES):
            current = self._store.get(key)
            if current is not None and _generation_of(current) > own.generation:
                raise Rejected(
                    f"segment {own.name} is of generation {_generation_of(current)} already, "
                    f"this start would be {own.generation}: another process has its name"
                )
            if self._store.compare_and_swap(key, current, records.encode(own), ttl_s=ttl_s):
                return
        raise TransferError(f"the record of segment {own.name} keeps changing; not published")

    def withdraw(self, own: SegmentDescriptor) -> None:
        """Remove our record, unless a later start has replaced it."""
        try:
            self._store.compare_and_swap(records.PREFIX + own.name, records.encode(own), None)
        except MetadataError as error:
            _log.warning("segment %s stays in the metadata store: %s", own.name, error)


def _other_generation(now: SegmentDescriptor, generation: int) -> Rejected:
    return Rejected(
        f"segment {now.name} is of generation {now.generation} now, "
        f"the region is of generation {generation}"
    )


def _generation_of(value: bytes) -> int:
    """Return the generation in a record; -1 for a broken record, which may be replaced."""
    try:
        return records.decode(value).generation
    except ValueError:
        return -1
