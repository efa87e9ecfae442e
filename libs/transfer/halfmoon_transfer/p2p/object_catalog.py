"""Read, list and change object records in the metadata store, by compare-and-swap."""

import logging
import random
import time
from collections.abc import Callable

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_transfer.metadata import descriptor
from halfmoon_transfer.p2p import object_record as records
from halfmoon_transfer.p2p.object_record import ObjectRecord, ShardSource
from halfmoon_transfer.p2p.p2p_errors import P2PError

_log = logging.getLogger(__name__)
#: Each failed try means that another client's change succeeded.
_MAX_TRIES = 200
_PAUSE_S = 0.02

#: Maps the current record to the new one; None means no record. May be called several times.
RecordChange = Callable[[ObjectRecord | None], ObjectRecord | None]


class ObjectCatalog:
    """The records of all objects. Calls block on the store, and raise its errors."""

    def __init__(self, store: MetadataStore, *, pause_s: float = _PAUSE_S) -> None:
        self._store = store
        #: The longest pause before a change that lost its compare-and-swap is tried again.
        self._pause_s = pause_s

    def read(self, name: str) -> ObjectRecord | None:
        """Return the record of this name, or None.

        Raises:
            P2PError: the record is broken.
            MetadataError: the store fails.
        """
        return self._decode(name, self._store.get(records.PREFIX + name))

    def list(self, prefix: str) -> list[ObjectRecord]:
        """Return the records whose names have this prefix, by name; skip broken ones."""
        found = []
        for key, value in sorted(self._store.list(records.PREFIX + prefix).items()):
            try:
                found.append(records.decode(value))
            except ValueError as error:
                _log.warning("the record %s is broken: %s", key, error)
        return found

    def change(self, name: str, change: RecordChange) -> ObjectRecord | None:
        """Apply a change atomically to the current record, and return the record afterwards.

        Raises:
            P2PError: other clients keep changing the record, or it is broken.
            MetadataError: the store fails.
        """
        key = records.PREFIX + name
        for _ in range(_MAX_TRIES):
            value = self._store.get(key)
            before = self._decode(name, value)
            after = change(before)
            if after == before:
                return after
            new = None if after is None else records.encode(after)
            if self._store.compare_and_swap(key, value, new):
                return after
            # Clients that lost the same race must not collide again at once.
            time.sleep(random.uniform(0, self._pause_s))
        raise P2PError(f"the record of object {name} keeps changing; tried {_MAX_TRIES} times")

    def remove(self, name: str) -> bool:
        """Delete the record, even a broken one; return True if there was one."""
        return self._store.delete(records.PREFIX + name)

    def is_gone(self, source: ShardSource) -> bool:
        """Return True if the store says that this start of a segment has ended."""
        value = self._store.get(descriptor.PREFIX + source.segment)
        if value is None:
            return True
        try:
            return descriptor.decode(value).generation != source.generation
        except ValueError:
            return False

    def _decode(self, name: str, value: bytes | None) -> ObjectRecord | None:
        if value is None:
            return None
        try:
            return records.decode(value)
        except ValueError as error:
            raise P2PError(f"the record of object {name} is broken: {error}") from None
