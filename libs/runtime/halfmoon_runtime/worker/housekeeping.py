"""Pace a worker's housekeeping: often while it has requests, seldom while it is idle."""

import asyncio
from contextlib import suppress

#: Seconds between two rounds while requests are here, and at the most while none is.
BUSY_S = 0.1
IDLE_S = 1.0


class HousekeepingPace:
    """Waits between two rounds of housekeeping, for one event loop."""

    def __init__(self, *, busy_s: float = BUSY_S, idle_s: float = IDLE_S) -> None:
        """Set the seconds between two rounds, while the worker is busy and while it is idle."""
        self._busy_s = busy_s
        self._idle_s = idle_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Begin the next round at once if the worker is idle: a request has arrived."""
        self._woken.set()

    async def wait(self, *, idle: bool) -> None:
        """Wait for the next round.

        Args:
            idle: whether no request is here; then `wake` ends the wait.
        """
        if not idle:
            await asyncio.sleep(self._busy_s)
            return
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle_s):
                await self._woken.wait()
