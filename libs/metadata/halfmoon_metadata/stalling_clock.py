"""Measure lease time by a clock that stands still while its event loop stalls.

A worker that renews its lease in time must not lose it because the server did not listen. So a
lease expires by the time in which it could have been renewed. Time during which the loop stalled,
or the process was stopped, does not count.

    real time    0──1──2──3──────── stall ────────13──14──15
    this clock   0──1──2──3──4┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄4───5───6
"""

import asyncio
import time
from collections.abc import Callable

#: Seconds between two ticks of the loop, and seconds without a tick that still count.
_PERIOD_S = 0.25
MAX_GAP_S = 1.0


class StallingClock:
    """Return seconds that only grow, to any thread; one thread calls `tick`.

    Args:
        clock: returns real seconds; a test passes a clock that it advances itself.
        max_gap_s: most seconds that count between two ticks.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_gap_s: float = MAX_GAP_S
    ) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        #: Real and own time at the last tick; one object, so that threads read both at once.
        self._last = (clock(), 0.0)

    def __call__(self) -> float:
        """Return the time now."""
        real_s, own_s = self._last
        return own_s + min(self._clock() - real_s, self._max_gap_s)

    def tick(self) -> None:
        """Record that the event loop is running."""
        now_s = self()
        self._last = (self._clock(), now_s)

    async def tick_forever(self) -> None:
        """Tick in the running event loop, until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(_PERIOD_S)
