"""Hold one lock for each key in use, such as each peer that is being dialled.

Keys come from peers, and there may be any number of them over time. So a lock is forgotten when
its last user is done.
"""

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

KeyT = TypeVar("KeyT", bound=Hashable)


class KeyedLocks(Generic[KeyT]):
    """The locks of all keys."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[KeyT, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._locks)

    def lock(self, key: KeyT) -> asyncio.Lock:
        """Return the lock of a key; it stays the same while something refers to it."""
        if (lock := self._locks.get(key)) is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
