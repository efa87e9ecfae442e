"""Queue received messages, up to a bound, until the queue is closed.

Messages queued before the close are still delivered; then every `get` raises. A waiting call
holds no item, so a cancelled `get` loses nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from halfmoon_runtime.channels.network import PeerUnreachable

T = TypeVar("T")


class ReceiveQueue(Generic[T]):
    """Hold at most `limit` items, for one event loop."""

    def __init__(self, limit: int, on_room: Callable[[], None] | None = None) -> None:
        """Start empty.

        Args:
            limit: most items.
            on_room: called when a full queue has room again.
        """
        assert limit > 0
        self._limit = limit
        self._on_room = on_room
        self._items: deque[T] = deque()
        #: Reason of the close; None while the queue is open.
        self._close_reason: str | None = None
        #: The calls of `get` that wait.
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self) -> bool:
        """Return whether another item fits; a closed queue has no room."""
        return self._close_reason is None and len(self._items) < self._limit

    async def get(self) -> T:
        """Remove and return the oldest item.

        Raises:
            PeerUnreachable: the queue is empty and closed.
        """
        while not self._items:
            if self._close_reason is not None:
                raise PeerUnreachable(self._close_reason)
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                self._waiting.remove(waiter)
        was_full = len(self._items) == self._limit
        item = self._items.popleft()
        if was_full and self._on_room is not None:
            self._on_room()
        return item

    def try_put(self, item: T) -> bool:
        """Add an item if the queue is open and has room; return whether it was added."""
        if not self.has_room():
            return False
        self._items.append(item)
        self._wake()
        return True

    def close(self, reason: str, *, discard: bool = False) -> None:
        """Accept no more items; `discard` drops the queued ones too. The first reason stays."""
        if discard:
            self._items.clear()
        if self._close_reason is None:
            self._close_reason = reason
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls: one of them finds the item, however many are cancelled."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
