"""A clock for leases that an event loop serves: it stands still while that loop does.

Who renews a lease in time must not lose it because the server did not listen. So a lease runs
out by the time in which it could have been renewed, and not by the time that a stalled loop, or
a stopped process, let pass.

    real time    0──1──2──3──────── stall ────────13──14──15
    this clock   0──1──2──3──4┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄4───5───6
"""

import asyncio
import time
from collections.abc import Callable

#: Seconds between two looks at the loop, and those without one that still count.
_PERIOD_S = 0.25
MAX_GAP_S = 1.0


class StallingClock:
    """Seconds that only grow. Call it from any thread; `tick` from one.

    Args:
        clock: real seconds; a test gives one that it moves itself.
        max_gap_s: seconds that count at the most between two ticks.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_gap_s: float = MAX_GAP_S
    ) -> None:
        self._clock = clock
        self._max_gap_s = max_gap_s
        #: Real and own time at the last tick; one object, so that threads read both at once.
        self._last = (clock(), 0.0)

    def __call__(self) -> float:
        """The time now."""
        real_s, own_s = self._last
        return own_s + min(self._clock() - real_s, self._max_gap_s)

    def tick(self) -> None:
        """Say that the server serves."""
        now_s = self()
        self._last = (self._clock(), now_s)

    async def follow(self) -> None:
        """Tick as long as the running loop does; until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(_PERIOD_S)
