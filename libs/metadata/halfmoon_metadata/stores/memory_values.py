"""Keep values in this process's memory."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from halfmoon_metadata.value_store import check_names


class MemoryValues:
    """A `ValueStore` in this process's memory.

    Args:
        ttl_s: seconds after which a value ends.
        max_bytes: bytes of one owner's values.
        clock: returns seconds.
    """

    def __init__(
        self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        #: Values by owner and name with the time of their end, the oldest first.
        self._owners: dict[str, OrderedDict[str, tuple[float, bytes]]] = {}
        self._n_bytes: dict[str, int] = {}

    def put(self, owner: str, name: str, value: bytes) -> bool:
        """See `ValueStore.put`."""
        check_names(owner, name)
        if len(value) > self._max_bytes:
            return False
        with self._lock:
            now = self._clock()
            for each in list(self._owners):
                self._drop_ended(each, now)
            self._drop(owner, name)
            while self._n_bytes.get(owner, 0) + len(value) > self._max_bytes:
                self._drop(owner, next(iter(self._owners[owner])))
            values = self._owners.setdefault(owner, OrderedDict())
            values[name] = now + self._ttl_s, value
            self._n_bytes[owner] = self._n_bytes.get(owner, 0) + len(value)
        return True

    def get(self, owner: str, name: str) -> bytes | None:
        """See `ValueStore.get`."""
        check_names(owner, name)
        with self._lock:
            self._drop_ended(owner, self._clock())
            values = self._owners.get(owner)
            found = None if values is None else values.get(name)
        return None if found is None else found[1]

    def delete(self, owner: str, name: str) -> bool:
        """See `ValueStore.delete`."""
        check_names(owner, name)
        with self._lock:
            self._drop_ended(owner, self._clock())
            return self._drop(owner, name)

    def close(self) -> None:
        """See `ValueStore.close`."""

    def _drop_ended(self, owner: str, now: float) -> None:
        values = self._owners.get(owner)
        while values and next(iter(values.values()))[0] <= now:
            self._drop(owner, next(iter(values)))

    def _drop(self, owner: str, name: str) -> bool:
        values = self._owners.get(owner)
        dropped = None if values is None else values.pop(name, None)
        if dropped is None:
            return False
        self._n_bytes[owner] -= len(dropped[1])
        if not values:
            del self._owners[owner], self._n_bytes[owner]
        return True
