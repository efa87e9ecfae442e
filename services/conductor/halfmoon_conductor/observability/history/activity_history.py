"""Count what a conductor does, second by second.

Counters are of tries and prompts, as `request_history` records them. Numbers of requests under way
are read when a second is over.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Literal

import msgspec

from halfmoon_conductor.observability.history.latency_history import KEPT_SECONDS

#: Phases of requests that wait for a place or for pages.
WAITING_PHASES = ("deferred", "waiting")
#: What is counted: tries that arrived, tries by their end, and tokens of prefilled prompts.
ActivityCounter = Literal[
    "arrived",
    "finished",
    "cancelled",
    "rejected",
    "failed",
    "placed_again",
    "prompt_tokens",
    "cached_tokens",
]


class ActivitySecond(msgspec.Struct):
    """One second: counts of what happened in it, and the state at its end."""

    #: Begin of the second on the conductor's clock.
    at_s: int
    #: Tries that arrived, and how tries ended.
    arrived: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected: int = 0
    failed: int = 0
    #: Tries whose worker failed, and whose request was placed again.
    placed_again: int = 0
    #: Tokens of prompts that were prefilled, and those of them that were not computed.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: Requests at the end of the second: all, and those that wait for a place or a worker.
    running: int = 0
    waiting: int = 0


class ActivityHistory:
    """Keep the counts of each second for ten minutes."""

    def __init__(self) -> None:
        self._over: deque[ActivitySecond] = deque(maxlen=KEPT_SECONDS)
        self._current: ActivitySecond | None = None

    def is_over(self, now: float) -> bool:
        """Return whether the current second is over; so is one that never began."""
        return self._current is None or now >= self._current.at_s + 1

    def begin(self, now: float, requests: Mapping[str, int]) -> None:
        """Begin a second; the one before it ends with these requests under way, by phase."""
        if self._current is not None:
            self._current.running = sum(requests.values())
            self._current.waiting = sum(requests[phase] for phase in WAITING_PHASES)
            self._over.append(self._current)
        self._current = ActivitySecond(math.floor(now))

    def add(self, counter: ActivityCounter, n: int = 1) -> None:
        """Add to a counter of the current second."""
        if self._current is not None:
            setattr(self._current, counter, getattr(self._current, counter) + n)

    def since(self, at_s: float, now: float) -> list[ActivitySecond]:
        """Return the completed seconds that began later than `at_s`, the oldest first."""
        oldest_s = math.floor(now) - KEPT_SECONDS
        return [s for s in self._over if s.at_s >= oldest_s and s.at_s > at_s]
