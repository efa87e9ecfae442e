"""Store records in this process's memory: for tests, and behind the conductor's HTTP endpoint.

Expired records are removed at the next call, by a heap of deadlines. So records that are never
read again do not pile up.
"""

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from halfmoon_metadata.record_limits import (
    check_key,
    check_listing,
    check_prefix,
    check_ttl,
    check_value,
    next_count,
)
from halfmoon_metadata.store_interface import MetadataRefused

#: Bytes of all records together: a client in a loop must not exhaust the process's memory.
MAX_STORE_BYTES = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Record:
    value: bytes
    #: Seconds by the store's clock; None: no lease.
    expires_at: float | None


class MemoryStore:
    """A `MetadataStore` in a dict.

    Args:
        clock: returns seconds that only grow; a test passes a clock that it advances itself.
        max_bytes: most bytes of all keys and values together.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_bytes: int = MAX_STORE_BYTES
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        #: Sum of `_size` over `_records`.
        self._n_bytes = 0
        #: A heap of (deadline, key) of every lease. Entries of leases that were renewed or removed
        #: since are recognised by their record, skipped, and removed when there are many.
        self._deadlines: list[tuple[float, str]] = []

    def get(self, key: str) -> bytes | None:
        """See `MetadataStore.get`."""
        check_key(key)
        with self._lock:
            self._expire()
            return self._value(key)

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """See `MetadataStore.put`."""
        self._check(key, value, ttl_s)
        with self._lock:
            self._expire()
            self._set(key, value, ttl_s)

    def delete(self, key: str) -> bool:
        """See `MetadataStore.delete`."""
        check_key(key)
        with self._lock:
            self._expire()
            return self._remove(key)

    def list(self, prefix: str) -> dict[str, bytes]:
        """See `MetadataStore.list`."""
        check_prefix(prefix)
        with self._lock:
            self._expire()
            found = {
                key: record.value for key, record in self._records.items() if key.startswith(prefix)
            }
        check_listing(prefix, found)
        return found

    def compare_and_swap(
        self, key: str, expected: bytes | None, value: bytes | None, *, ttl_s: float | None = None
    ) -> bool:
        """See `MetadataStore.compare_and_swap`."""
        self._check(key, value, ttl_s)
        with self._lock:
            self._expire()
            if self._value(key) != expected:
                return False
            if value is None:
                self._remove(key)
            else:
                self._set(key, value, ttl_s)
            return True

    def increment(self, key: str) -> int:
        """See `MetadataStore.increment`."""
        check_key(key)
        with self._lock:
            self._expire()
            count = next_count(key, self._value(key))
            self._set(key, str(count).encode(), None)
            return count

    def close(self) -> None:
        """Do nothing: other callers may use the same store."""

    def check(self) -> None:
        """Assert that sizes and deadlines agree with the records."""
        with self._lock:
            assert self._n_bytes == sum(_size(k, r.value) for k, r in self._records.items())
            leased = {(r.expires_at, k) for k, r in self._records.items() if r.expires_at}
            assert leased <= set(self._deadlines), "a lease that nothing ends"

    def _check(self, key: str, value: bytes | None, ttl_s: float | None) -> None:
        check_key(key)
        check_ttl(key, ttl_s)
        if value is not None:
            check_value(key, value)

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            record = self._records.get(key)
            if record is not None and record.expires_at == deadline:
                self._remove(key)

    def _value(self, key: str) -> bytes | None:
        record = self._records.get(key)
        return None if record is None else record.value

    def _set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        old = self._records.get(key)
        n_bytes = self._n_bytes + _size(key, value) - (_size(key, old.value) if old else 0)
        if n_bytes > self._max_bytes:
            raise MetadataRefused(
                f"the store is full: {key!r} with {len(value)} bytes would make it {n_bytes} "
                f"bytes, the limit is {self._max_bytes}; remove records or put them under a lease"
            )
        expires_at = None if ttl_s is None else self._clock() + ttl_s
        if expires_at is not None:
            heapq.heappush(self._deadlines, (expires_at, key))
        self._records[key] = _Record(bytes(value), expires_at)
        self._n_bytes = n_bytes
        if len(self._deadlines) > 4 * len(self._records) + 1000:
            self._forget_old_deadlines()

    def _forget_old_deadlines(self) -> None:
        self._deadlines = [
            (record.expires_at, key)
            for key, record in self._records.items()
            if record.expires_at is not None
        ]
        heapq.heapify(self._deadlines)

    def _remove(self, key: str) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._n_bytes -= _size(key, record.value)
        return True


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value)
