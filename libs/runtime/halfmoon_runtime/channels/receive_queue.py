"""A bounded queue of received messages that has an end: what `receive` calls read from.

What was queued before the end is still delivered; then every `get` raises. No item is in
anybody's hands while a call waits, so a cancelled `get` loses nothing and a cancelled `put`
added nothing.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from halfmoon_runtime.channels.network import PeerUnreachable

T = TypeVar("T")


class ReceiveQueue(Generic[T]):
    """At most `limit` items; for one event loop."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self._limit = limit
        self._items: deque[T] = deque()
        #: Why nothing more will come; None while something may.
        self._end: str | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        """The oldest item.

        Raises:
            PeerUnreachable: there is none, and none will come.
        """
        while not self._items:
            if self._end is not None:
                raise PeerUnreachable(self._end)
            self._arrived.clear()
            await self._arrived.wait()
        self._room.set()
        return self._items.popleft()

    async def put(self, item: T) -> None:
        """Add an item, waiting for room; after the end it is dropped."""
        while not self.try_put(item) and self._end is None:
            self._room.clear()
            await self._room.wait()

    def try_put(self, item: T) -> bool:
        """Add an item if there is room and no end yet; whether it was added."""
        if self._end is not None or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._arrived.set()
        return True

    def close(self, reason: str, *, discard: bool = False) -> None:
        """Nothing more will come; `discard`: and what is queued is lost. The first reason stays."""
        if discard:
            self._items.clear()
        if self._end is None:
            self._end = reason
        self._arrived.set()
        self._room.set()
