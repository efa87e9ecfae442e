"""Queue received messages, up to a bound, until the queue is closed.

Messages queued before the close are still delivered; then every `get` raises. A waiting call
holds no item, so a cancelled `get` loses nothing and a cancelled `put` added nothing.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from halfmoon_runtime.channels.network import PeerUnreachable

T = TypeVar("T")


class ReceiveQueue(Generic[T]):
    """Hold at most `limit` items, for one event loop."""

    def __init__(self, limit: int) -> None:
        assert limit > 0
        self._limit = limit
        self._items: deque[T] = deque()
        #: Reason of the close; None while the queue is open.
        self._close_reason: str | None = None
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        """Remove and return the oldest item.

        Raises:
            PeerUnreachable: the queue is empty and closed.
        """
        while not self._items:
            if self._close_reason is not None:
                raise PeerUnreachable(self._close_reason)
            self._arrived.clear()
            await self._arrived.wait()
        self._room.set()
        return self._items.popleft()

    async def put(self, item: T) -> None:
        """Add an item, waiting for room; drop it if the queue is closed."""
        while not self.try_put(item) and self._close_reason is None:
            self._room.clear()
            await self._room.wait()

    def try_put(self, item: T) -> bool:
        """Add an item if the queue is open and has room; return whether it was added."""
        if self._close_reason is not None or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._arrived.set()
        return True

    def close(self, reason: str, *, discard: bool = False) -> None:
        """Accept no more items; `discard` drops the queued ones too. The first reason stays."""
        if discard:
            self._items.clear()
        if self._close_reason is None:
            self._close_reason = reason
        self._arrived.set()
        self._room.set()
