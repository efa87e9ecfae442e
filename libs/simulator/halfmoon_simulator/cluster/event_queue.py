"""Order calls by time: a heap and a number for a clock.

One rule orders everything: by time, and at equal times in the order in which the calls were
put on the queue. So a run is a function of its inputs, byte for byte.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Calls to come, and the time of the one that is being made."""

    def __init__(self) -> None:
        #: Seconds; never goes back.
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n_added = 0
        #: Calls made so far.
        self.n_processed = 0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call at a time, which is now at the earliest."""
        self._n_added += 1
        heappush(self._heap, (max(time_s, self.now), self._n_added, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call so many seconds from now."""
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """Make the next call; return whether there was one."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heappop(self._heap)
        self.n_processed += 1
        call(*arguments)
        return True

    def __len__(self) -> int:
        return len(self._heap)
