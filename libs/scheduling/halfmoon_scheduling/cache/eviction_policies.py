"""Implement the eviction policies, and register them by name.

Another policy is one class and its name in the loop below `EVICTION_POLICIES`. `docs/pool.md`
compares the policies on the published traces.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from halfmoon_scheduling.cache.eviction_policy import EvictionPolicy
from halfmoon_scheduling.cache.reuse_time_policy import ReuseTimePolicy
from halfmoon_scheduling.cache.row_queues import RowQueues, extend_columns
from halfmoon_scheduling.registry import Registry


class Fifo(EvictionPolicy):
    """Evict the block first that was stored first, whatever its uses."""

    name = "fifo"

    def __init__(self) -> None:
        #: One queue with the next row to evict at its head.
        self._queue: RowQueues[None] = RowQueues()
        self._n = 0

    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        self._queue.append(None, row)
        self._n += 1

    def touch(self, row: int) -> None:
        """Ignore a use."""

    def remove(self, row: int) -> None:
        """See `EvictionPolicy.remove`."""
        self._queue.remove(None, row)
        self._n -= 1

    def candidates(self) -> Iterator[int]:
        """See `EvictionPolicy.candidates`."""
        return self._queue.rows(None)

    def __len__(self) -> int:
        return self._n


class Lru(Fifo):
    """Evict the least recently used block first."""

    name = "lru"

    def touch(self, row: int) -> None:
        """See `EvictionPolicy.touch`."""
        self.touch_all((row,))

    def touch_all(self, rows: Sequence[int]) -> None:
        """See `EvictionPolicy.touch_all`."""
        if rows:
            self._queue.move_to_end(None, rows)


class _Ranked(EvictionPolicy):
    """Evict the lowest rank first, and within a rank the least recently used row."""

    def __init__(self) -> None:
        self._depths = array("I")
        self._uses = array("I")
        self._queues: RowQueues[tuple[int, int]] = RowQueues()
        #: The ranks that have rows, the next to evict first.
        self._ranks: list[tuple[int, int]] = []
        self._n = 0

    @abstractmethod
    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        """Return the rank of a row."""

    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        extend_columns(row, self._depths, self._uses)
        self._depths[row] = depth
        self._place(row, 1)

    def touch(self, row: int) -> None:
        """See `EvictionPolicy.touch`."""
        self.remove(row)
        self._place(row, self._uses[row] + 1)

    def remove(self, row: int) -> None:
        """See `EvictionPolicy.remove`."""
        rank = self._rank(self._uses[row], self._depths[row])
        self._queues.remove(rank, row)
        if rank not in self._queues:
            del self._ranks[bisect_left(self._ranks, rank)]
        self._n -= 1

    def candidates(self) -> Iterator[int]:
        """See `EvictionPolicy.candidates`."""
        for rank in self._ranks:
            yield from self._queues.rows(rank)

    def __len__(self) -> int:
        return self._n

    def _place(self, row: int, uses: int) -> None:
        self._uses[row] = uses
        rank = self._rank(uses, self._depths[row])
        if rank not in self._queues:
            insort(self._ranks, rank)
        self._queues.append(rank, row)
        self._n += 1


class Lfu(_Ranked):
    """Evict the least often used block first; among equals the least recently used one."""

    name = "lfu"

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, 0


class LengthAware(_Ranked):
    """Evict as LFU does, but among equals the block furthest from its prompt's start first.

    Mooncake's papers name a LengthAwareCache that is "similar to LFU" and do not say which end of
    a prompt it keeps. This one keeps the starts, which more prompts have in common.
    """

    name = "length_aware"

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, -depth


class LengthAwareLater(_Ranked):
    """Evict as LFU does, but among equals keep the ends of prompts: the other reading."""

    name = "length_aware_later"

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, depth


#: The policy of kvstores unless their settings name another one.
DEFAULT_EVICTION = ReuseTimePolicy.name
#: All eviction policies.
EVICTION_POLICIES: Registry[type[EvictionPolicy]] = Registry("eviction policy")
for _policy in (Lru, Lfu, Fifo, LengthAware, LengthAwareLater, ReuseTimePolicy):
    EVICTION_POLICIES.register(_policy)


def open_eviction_policy(name: str) -> EvictionPolicy:
    """Open a new, empty policy by name.

    Raises:
        ValueError: no policy has this name; the message lists those that there are.
    """
    return EVICTION_POLICIES[EVICTION_POLICIES.check(name)]()
