"""Read the time: from the machine, or from a test."""

import time
from typing import Protocol


class Clock(Protocol):
    """Count seconds from an arbitrary start, for durations and deadlines; they only grow."""

    def now(self) -> float:
        """Return the time now, in seconds."""
        ...


class SystemClock:
    """Read the machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


class FakeClock:
    """Stand still until a test advances the clock."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time by `seconds`."""
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
