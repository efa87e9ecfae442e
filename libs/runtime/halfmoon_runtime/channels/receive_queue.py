"""Queue received messages, up to bounds, until the queue is closed.

Messages queued before the close are still delivered; then every `get` raises. A waiting call
holds no item, so a cancelled `get` loses nothing.
"""

import asyncio
import math
from collections import deque
from typing import Generic, TypeVar

from halfmoon_runtime.channels.network import PeerUnreachable

T = TypeVar("T")


class ReceiveQueue(Generic[T]):
    """Hold at most `limit` items, and `most_bytes` of the frames that they came in."""

    def __init__(self, limit: int, most_bytes: float = math.inf) -> None:
        assert limit > 0
        self._limit, self._most_bytes = limit, most_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._n_bytes = 0
        #: Reason of the close; None while the queue is open.
        self._close_reason: str | None = None
        #: The calls of `get` that wait.
        self._waiting: deque[asyncio.Future[None]] = deque()

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
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                self._waiting.remove(waiter)
        item, n_bytes = self._items.popleft()
        self._n_bytes -= n_bytes
        return item

    def try_put(self, item: T, n_bytes: int = 0) -> bool:
        """Add an item if the queue is open and has room; return whether it was added."""
        if self._close_reason is not None or len(self._items) >= self._limit:
            return False
        if self._n_bytes + n_bytes > self._most_bytes:
            return False
        self._items.append((item, n_bytes))
        self._n_bytes += n_bytes
        self._wake()
        return True

    def close(self, reason: str, *, discard: bool = False) -> None:
        """Accept no more items; `discard` drops the queued ones too. The first reason stays."""
        if discard:
            self._items.clear()
            self._n_bytes = 0
        if self._close_reason is None:
            self._close_reason = reason
        self._wake()

    def _wake(self) -> None:
        """Wake all waiting calls: one of them finds the item, however many are cancelled."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
