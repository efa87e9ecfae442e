"""Decide when a service that ended is started again, and when no more."""

from collections import deque

#: A service that ends so often within so many seconds stays stopped.
MAX_DEATHS = 5
WINDOW_S = 60.0
#: Seconds until the first start, doubled with each further death within the window.
FIRST_PAUSE_S = 0.5


class RestartPolicy:
    """Count the deaths of services."""

    def __init__(self) -> None:
        self._deaths: dict[str, deque[float]] = {}

    def pause_after_death(self, name: str, now: float) -> float | None:
        """Return the seconds until the service is started again; None: it stays stopped.

        Args:
            name: of the service that has ended.
            now: seconds of a monotonic clock.
        """
        deaths = self._deaths.setdefault(name, deque())
        deaths.append(now)
        while deaths[0] <= now - WINDOW_S:
            deaths.popleft()
        if len(deaths) >= MAX_DEATHS:
            return None
        return FIRST_PAUSE_S * 2.0 ** (len(deaths) - 1)
