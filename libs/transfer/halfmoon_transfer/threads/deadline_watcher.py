"""End overdue items from one thread.

The thread sleeps until the earliest deadline that was known when it last scanned the items. Items
rarely become overdue, so scanning them is cheaper than keeping them sorted.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class HasDeadline(Protocol):
    """An item with a deadline."""

    @property
    def deadline(self) -> float:
        """Deadline on the monotonic clock."""
        ...


Item = TypeVar("Item", bound=HasDeadline)


class DeadlineWatcher(Generic[Item]):
    """Calls `on_overdue` for each watched item whose deadline has passed, once."""

    def __init__(self, name: str, on_overdue: Callable[[Item], None]) -> None:
        self._on_overdue = on_overdue
        self._watched: set[Item] = set()
        self._changed = threading.Condition()
        #: Time of the next scan.
        self._wake_at = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, item: Item) -> None:
        """Watch an item from now on."""
        with self._changed:
            self._watched.add(item)
            if item.deadline < self._wake_at:
                self._changed.notify()

    def forget(self, item: Item) -> None:
        """Stop watching an item."""
        with self._changed:
            self._watched.discard(item)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                overdue = [item for item in self._watched if item.deadline <= now]
                self._watched.difference_update(overdue)
                if not overdue:
                    deadlines = (item.deadline for item in self._watched)
                    self._wake_at = min(deadlines, default=float("inf"))
                    timeout_s = self._wake_at - now
                    self._changed.wait(None if timeout_s == float("inf") else timeout_s)
            for item in overdue:
                self._on_overdue(item)
