"""Keep values that end by themselves, within a limit for each owner.

A metadata store's records are few and small, and members of a cluster depend on them. These values
may be large and many, so they have stores of their own: no listing sees them, and one owner's
values make room for its own new ones alone.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

#: Names of owners and of values.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class ValueStore(Protocol):
    """Store values by owner and name. Calls may wait for a server: keep them off an event loop.

    All methods raise `MetadataError` if the server can't be reached or refuses, and ValueError for
    a name that is not one.
    """

    def put(self, owner: str, name: str, value: bytes) -> bool:
        """Store a value; the owner's oldest ones make room for it.

        Returns:
            False if it alone is larger than an owner's limit: then nothing has changed.
        """
        ...

    def get(self, owner: str, name: str) -> bytes | None:
        """Return a value; None if it was never there, has ended or has made room."""
        ...

    def delete(self, owner: str, name: str) -> bool:
        """Remove a value; False if it was not there."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


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
            values = self._owners.setdefault(owner, OrderedDict())
            while self._n_bytes.get(owner, 0) + len(value) > self._max_bytes:
                self._drop(owner, next(iter(values)))
            self._owners[owner] = values
            values[name] = now + self._ttl_s, value
            self._n_bytes[owner] = self._n_bytes.get(owner, 0) + len(value)
        return True

    def get(self, owner: str, name: str) -> bytes | None:
        """See `ValueStore.get`."""
        check_names(owner, name)
        with self._lock:
            self._drop_ended(owner, self._clock())
            found = self._owners.get(owner, {}).get(name)
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


def open_values(url: str, *, ttl_s: float, max_bytes: int, tls_ca: str = "") -> ValueStore:
    """Open a store of values: at a Redis, else in this process's memory.

    Args:
        url: of a metadata server; ``redis://`` and ``rediss://`` can keep values.
        ttl_s: seconds after which a value ends.
        max_bytes: bytes of one owner's values.
        tls_ca: PEM file of CAs to trust besides the system's, see `tls_trust`.

    Raises:
        ValueError: the URL or the file of CAs can't be used.
    """
    if urlsplit(url).scheme in ("redis", "rediss"):
        from halfmoon_metadata.stores.redis_values import RedisValues

        return RedisValues(url, ttl_s=ttl_s, max_bytes=max_bytes, tls_ca=tls_ca)
    return MemoryValues(ttl_s=ttl_s, max_bytes=max_bytes)


def check_names(*names: str) -> None:
    """Check the names of an owner and a value.

    Raises:
        ValueError: one is empty, longer than 128 characters, or has others than letters, digits
            and ``_.-``.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is no name of a value or its owner")
