"""In which order a full cache gives things up: policies by name.

A policy knows keys, where they stand in their prompts, and their use, never sizes or pins: it
proposes an order, and the cache skips what it may not evict. Another policy is one class and
one line in `POLICIES`. How they compare on the published traces is in `docs/pool.md`.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from heapq import merge
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order over the keys of a cache, the first to be evicted first."""

    @abstractmethod
    def insert(self, key: K, depth: int = 0, *, tail: bool = False) -> None:
        """A key that is not here yet is stored now. Changes state.

        Args:
            key: it.
            depth: keys before it in its prompt.
            tail: whether it is the last one of its prompt.
        """

    @abstractmethod
    def touch(self, key: K) -> None:
        """A key that is here was used. Changes state."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """A key that is here is gone. Changes state."""

    @abstractmethod
    def candidates(self) -> Iterator[K]:
        """All keys in eviction order. Leave the policy unchanged while iterating."""

    @abstractmethod
    def __len__(self) -> int: ...


class Fifo(EvictionPolicy[K]):
    """The one stored longest goes first, used or not."""

    def __init__(self) -> None:
        #: Keys, the oldest first.
        self._keys: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        self._keys[key] = None

    def touch(self, key: K) -> None:
        """Use does not count."""

    def remove(self, key: K) -> None:
        """See `EvictionPolicy.remove`."""
        del self._keys[key]

    def candidates(self) -> Iterator[K]:
        """See `EvictionPolicy.candidates`."""
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class Lru(Fifo[K]):
    """The one unused longest goes first."""

    def touch(self, key: K) -> None:
        """See `EvictionPolicy.touch`."""
        self._keys.move_to_end(key)


class _Grouped(EvictionPolicy[K]):
    """Groups of keys, each in order of use; the lowest group goes first."""

    def __init__(self) -> None:
        self._depths: dict[K, int] = {}
        self._uses: dict[K, int] = {}
        #: Keys by rank, each group in order of use; no group is empty.
        self._groups: dict[tuple[int, int], OrderedDict[K, None]] = {}
        #: The ranks of `_groups`, the first to be evicted first.
        self._ranks: list[tuple[int, int]] = []

    @abstractmethod
    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        """The group of a key."""

    def insert(self, key: K, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        self._place(key, 1, depth)

    def touch(self, key: K) -> None:
        """See `EvictionPolicy.touch`."""
        uses, depth = self._uses[key], self._depths[key]
        self.remove(key)
        self._place(key, uses + 1, depth)

    def remove(self, key: K) -> None:
        """See `EvictionPolicy.remove`."""
        rank = self._rank(self._uses.pop(key), self._depths.pop(key))
        group = self._groups[rank]
        del group[key]
        if not group:
            del self._groups[rank]
            del self._ranks[bisect_left(self._ranks, rank)]

    def candidates(self) -> Iterator[K]:
        """See `EvictionPolicy.candidates`."""
        for rank in self._ranks:
            yield from self._groups[rank]

    def __len__(self) -> int:
        return len(self._uses)

    def _place(self, key: K, uses: int, depth: int) -> None:
        self._uses[key], self._depths[key] = uses, depth
        rank = self._rank(uses, depth)
        if rank not in self._groups:
            self._groups[rank] = OrderedDict()
            insort(self._ranks, rank)
        self._groups[rank][key] = None


class Lfu(_Grouped[K]):
    """The one used least often goes first; among equals the one unused longest."""

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, 0


class LengthAware(_Grouped[K]):
    """As LFU, but among equals the one furthest from its prompt's start goes first.

    Mooncake's papers name a LengthAwareCache that is "similar to LFU" and leave open which end
    of a prompt it keeps. This one keeps starts, which are common to more prompts.
    """

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, -depth


class LengthAwareLater(_Grouped[K]):
    """The other reading: among keys used equally often the ends of prompts are kept."""

    def _rank(self, uses: int, depth: int) -> tuple[int, int]:
        return uses, depth


class Patience(EvictionPolicy[K]):
    """The one that has waited longest for its worth goes first.

    A conversation that came back is likelier to come back again, and its blocks are worth a
    longer wait: LRU's waiting time is divided by a patience that grows with use. Waiting is
    counted in uses of the cache, so the policy needs no clock.

        patience    1 · 1.5 · 2 … 4.5     used once, twice, … eight times or more
                    learned               the last one of its prompt, not used again yet

    A prompt's last block often ends where no other prompt goes on. How often is learned: its
    patience is the share of such blocks that were used again, against that of other new ones.
    """

    _STEP = 0.5
    _MAX_USES = 8
    #: Queue of tails; the queue of keys used n times is n.
    _TAIL = 0
    #: New keys after whose end (used again or evicted) what was learned counts half.
    _HALF_LIFE = 20_000

    def __init__(self) -> None:
        #: One queue per patience: keys and when they were used, the one unused longest first.
        self._queues: list[OrderedDict[K, int]] = [OrderedDict() for _ in range(self._MAX_USES + 1)]
        #: Which queue a key is in.
        self._queue_of: dict[K, int] = {}
        #: Uses of the cache so far.
        self._now = 0
        #: Of tails [0] and of other new keys [1]: how many were used again, how many evicted.
        self._used_again = [1.0, 1.0]
        self._evicted = [1.0, 1.0]

    def insert(self, key: K, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        self._append(key, self._TAIL if tail else 1)

    def touch(self, key: K) -> None:
        """See `EvictionPolicy.touch`."""
        queue = self._take(key)
        self._learn(queue, self._used_again)
        self._append(key, 2 if queue == self._TAIL else min(queue + 1, self._MAX_USES))

    def remove(self, key: K) -> None:
        """See `EvictionPolicy.remove`."""
        self._learn(self._take(key), self._evicted)

    def candidates(self) -> Iterator[K]:
        """See `EvictionPolicy.candidates`."""
        waiting = (
            self._by_wait(queue, self._patience(index)) for index, queue in enumerate(self._queues)
        )
        return (key for _, key in merge(*waiting, key=_wait_of, reverse=True))

    def __len__(self) -> int:
        return len(self._queue_of)

    def _by_wait(self, queue: OrderedDict[K, int], patience: float) -> Iterator[tuple[float, K]]:
        """The longest wait for its worth first."""
        for key, used in queue.items():
            yield (self._now - used) / patience, key

    def _patience(self, queue: int) -> float:
        if queue != self._TAIL:
            return 1 + self._STEP * (queue - 1)
        tail, other = (
            again / (again + evicted)
            for again, evicted in zip(self._used_again, self._evicted, strict=True)
        )
        return min(tail / other, 1.0)

    def _learn(self, queue: int, outcomes: list[float]) -> None:
        if queue > 1:
            return
        outcomes[queue] += 1
        if self._used_again[queue] + self._evicted[queue] > self._HALF_LIFE:
            for learned in (self._used_again, self._evicted):
                learned[queue] /= 2

    def _append(self, key: K, queue: int) -> None:
        self._now += 1
        self._queue_of[key] = queue
        self._queues[queue][key] = self._now

    def _take(self, key: K) -> int:
        queue = self._queue_of.pop(key)
        del self._queues[queue][key]
        return queue


def _wait_of(waiting: tuple[float, object]) -> float:
    return waiting[0]


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {  # type: ignore[type-arg]
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "length_aware": LengthAware,
    "length_aware_later": LengthAwareLater,
    "patience": Patience,
}


def open_policy(name: str) -> "EvictionPolicy[K]":
    """A new, empty policy of this name.

    Raises:
        ValueError: no such policy; the text lists those there are.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"no eviction policy {name!r}, there are: {known}") from None
