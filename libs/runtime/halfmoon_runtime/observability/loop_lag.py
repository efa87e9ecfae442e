"""Measure how late an event loop runs its tasks: the first sign of an overloaded process."""

import asyncio
from collections import deque

from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets
from halfmoon_runtime.observability.metrics import MetricSnapshot

#: Seconds between two wake-ups. A stall is measured to at most this much less than its length.
_PERIOD_S = 0.25
#: Wake-ups in a row that are late when a loop is behind; a single pause makes one late.
_N_IN_A_ROW = 4


class LoopLagMonitor:
    """Sleep again and again, and measure how late each wake-up is."""

    def __init__(self) -> None:
        self.lag_s = FastHistogram(time_buckets(0.0005, 10.0))
        self._latest_s: deque[float] = deque([0.0], maxlen=_N_IN_A_ROW)

    @property
    def late_s(self) -> float:
        """Seconds by which the last wake-up was late."""
        return self._latest_s[-1]

    @property
    def behind_s(self) -> float:
        """Seconds by which each of the last wake-ups was late: what the loop is behind for good."""
        return min(self._latest_s)

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            late_s = max(0.0, loop.time() - due_s)
            self.lag_s.observe(late_s)
            self._latest_s.append(late_s)

    def metrics(self) -> MetricSnapshot:
        """Return the lag as metrics."""
        return {
            "halfmoon_event_loop_lag_seconds": (
                f"How late the event loop woke a task that asked for it, every {_PERIOD_S} s.",
                self.lag_s,
            ),
            "halfmoon_event_loop_behind_seconds": (
                f"By how much each of the last {_N_IN_A_ROW} such wake-ups was late at least.",
                self.behind_s,
            ),
        }
