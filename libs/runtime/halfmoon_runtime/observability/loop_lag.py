"""How long an event loop keeps what is due waiting: the first sign that a process is too busy."""

import asyncio

from halfmoon_runtime.observability.histogram import FastHistogram, time_buckets
from halfmoon_runtime.observability.metrics import MetricSnapshot

#: Seconds between two looks. A stall is seen with its whole length less at most this.
_PERIOD_S = 0.25


class LoopLagMonitor:
    """Asks to be woken, and looks how late it was."""

    def __init__(self) -> None:
        self.lag_s = FastHistogram(time_buckets(0.0005, 10.0))

    async def watch(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self.lag_s.observe(max(0.0, loop.time() - due_s))

    def metrics(self) -> MetricSnapshot:
        """What the metrics show."""
        return {
            "halfmoon_event_loop_lag_seconds": (
                f"How late the event loop woke a task that asked for it, every {_PERIOD_S} s.",
                self.lag_s,
            )
        }
