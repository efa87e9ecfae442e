"""Where "now" comes from: the machine, or a test."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, from an arbitrary start: for durations and deadlines."""

    def now(self) -> float:
        """Now, seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


class FakeClock:
    """Stands still until it is told to advance."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        assert seconds >= 0, "time does not run backwards"
        self._now += seconds
