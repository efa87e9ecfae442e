"""Predict the queue of one prefill worker in the order in which that worker computes it.

A prefill worker computes the largest priority first, then the earlier arrival
(`halfmoon_scheduling.prefill.prefill_queue`). A request under way pauses for a larger priority.
So a new request waits for those of its own priority and of larger ones. It also waits for the rest
of a forward pass that is under way, which is not predicted.

Seconds are kept as sums by priority: neither a change nor a prediction visits all requests. Not
predicted are `slack` among equal priorities, and a request that was overtaken for so long that it
goes before larger priorities.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from math import inf

from halfmoon_protocol.ids import RequestId

#: Negated priority, and a count of arrivals.
_Rank = tuple[int, int, RequestId]


@dataclass(slots=True)
class _Entry:
    rank: _Rank
    #: Predicted seconds; of a paused request those that had not run.
    left_s: float


@dataclass(slots=True)
class _Level:
    """Requests of one priority that do not run."""

    n: int = 0
    #: Sum of their seconds, except for rounding.
    seconds: float = 0.0


class PlannedQueue:
    """Requests of one conductor at one prefill worker, by priority and then by arrival."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._entries: dict[RequestId, _Entry] = {}
        #: In the order of their turns: ranks of exactly `_entries`, sorted. The first one runs.
        self._order: list[_Rank] = []
        #: All but the first one, by priority; none is empty.
        self._levels: dict[int, _Level] = {}
        #: When the first one should end; minus infinity without one.
        self._head_ends_s = -inf
        self._n_added = 0

    def is_first(self, request_id: RequestId) -> bool:
        """Return whether a request is the one that runs."""
        return bool(self._order) and self._order[0][2] == request_id

    def add(self, request_id: RequestId, seconds: float, priority: int, now: float) -> None:
        """Add a request of so many predicted seconds that is not here."""
        self._n_added += 1
        entry = _Entry((-priority, self._n_added, request_id), seconds)
        if not self._order:
            self._head_ends_s = now + seconds
        elif entry.rank < self._order[0]:
            paused = self._entries[self._order[0][2]]
            paused.left_s = max(0.0, self._head_ends_s - now)
            self._count(paused)
            self._head_ends_s = now + seconds
        else:
            self._count(entry)
        insort(self._order, entry.rank)
        self._entries[request_id] = entry

    def remove(self, request_id: RequestId, now: float) -> None:
        """Remove a request that is here, wherever it is; the next one runs from now on."""
        entry = self._entries.pop(request_id)
        place = bisect_left(self._order, entry.rank)
        del self._order[place]
        if place:
            self._discount(entry)
        elif self._order:
            head = self._entries[self._order[0][2]]
            self._discount(head)
            self._head_ends_s = now + head.left_s
        else:
            self._head_ends_s = -inf

    def behind_s(self, priority: int | None = None) -> float:
        """Return the seconds of requests before a new one, except of the one that runs.

        Args:
            priority: of the new request; None: less than all here.
        """
        seconds = 0.0
        for of_level, level in self._levels.items():
            if priority is None or of_level >= priority:
                seconds += level.seconds
        return seconds

    def head_ends_s(self, priority: int | None = None) -> float:
        """Return when the running request should end; minus infinity if it would pause.

        Args:
            priority: of the new request; None: less than all here.
        """
        if priority is not None and self._order and -self._order[0][0] < priority:
            return -inf
        return self._head_ends_s

    def _count(self, entry: _Entry) -> None:
        level = self._levels.setdefault(-entry.rank[0], _Level())
        level.n += 1
        level.seconds += entry.left_s

    def _discount(self, entry: _Entry) -> None:
        level = self._levels[-entry.rank[0]]
        level.n -= 1
        level.seconds = max(0.0, level.seconds - entry.left_s)
        if not level.n:
            del self._levels[-entry.rank[0]]  # exactly 0: sums of fractions drift

    def check(self) -> None:
        """Check the order, and that sums are those of the requests that do not run."""
        assert self._order == sorted(entry.rank for entry in self._entries.values())
        assert self._order or self._head_ends_s == -inf
        levels: dict[int, _Level] = {}
        for rank in self._order[1:]:
            level = levels.setdefault(-rank[0], _Level())
            level.n += 1
            level.seconds += self._entries[rank[2]].left_s
        assert levels.keys() == self._levels.keys()
        for priority, level in levels.items():
            kept = self._levels[priority]
            assert kept.n == level.n
            assert abs(kept.seconds - level.seconds) <= 1e-6 * max(1.0, level.seconds)
