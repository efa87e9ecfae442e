"""An eviction policy that learns how long blocks are worth waiting for.

LRU lets go of what has waited longest since its last use. Here the waiting time is divided by a
patience first, one for each number of uses: a conversation that came back is likelier to come back
again, and how much likelier depends on the traffic and on how much the cache holds. So it is
learned: of the blocks used twice, say, which share was used again before it was evicted, compared
with that share of new ones?

    patience    1                      used once
                √(share / share of 1)  used 2, 3, … 8 times or more; and:
                the same, at most 1    the last one of its prompt, not used again yet

The root, because among blocks that wait, those who return get rarer about with the square of the
time: then four times the share is worth twice the wait.

A prompt's last block often ends where no other prompt goes on, hence its own share. What a block
was used before it was evicted is remembered for a while (`GhostTable`): one that comes back soon
after
is not new. Waiting is counted in uses of the cache, so the policy needs no clock.
"""

from array import array
from collections.abc import Iterator
from heapq import merge
from math import sqrt

from halfmoon_scheduling.cache.eviction_policy import EvictionPolicy
from halfmoon_scheduling.cache.row_queues import RowQueues, extend_columns


class GhostTable:
    """How often blocks had been used when they went: four bytes each, the latest overwrite others.

    A block's place and what tells it from others there are both cut from its number.
    """

    #: Cells for each block that the cache holds.
    _PER_BLOCK = 4
    _SCATTER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
    _TAG_BITS, _USES_BITS = 28, 4

    def __init__(self) -> None:
        #: Tag and uses; 0: nobody. Their number is a power of two.
        self._cells = array("I", [0]) * 8

    def make_room(self, n_blocks: int) -> None:
        """The cache holds so many: remember in proportion. What is known stays known."""
        while len(self._cells) < self._PER_BLOCK * n_blocks:
            self._cells *= 2  # what was at i is looked up at i, or half of the table later

    def remember(self, key: int, uses: int) -> None:
        """A block went that had been used 1 to 15 times."""
        place, tag = self._find(key)
        self._cells[place] = tag << self._USES_BITS | uses

    def recall(self, key: int) -> int:
        """How often a block had been used; 0 when that is not known."""
        place, tag = self._find(key)
        cell = self._cells[place]
        return cell % (1 << self._USES_BITS) if cell >> self._USES_BITS == tag else 0

    def _find(self, key: int) -> tuple[int, int]:
        scattered = (key ^ key >> 32) * self._SCATTER % (1 << 64)
        return (scattered >> 8) % len(self._cells), scattered >> (64 - self._TAG_BITS)


class ReuseTimePolicy(EvictionPolicy):
    """The one that has waited longest for its worth goes first."""

    name = "patience"

    _MAX_USES = 8
    #: Queue of tails; the queue of blocks used n times is n.
    _TAIL = 0
    #: Ends of waiting (used again or evicted) in a queue after which what it taught counts half.
    _HALF_LIFE = 20_000

    def __init__(self) -> None:
        #: One queue per patience, the row unused longest first.
        self._queues: RowQueues[int] = RowQueues()
        #: Which queue a row is in, when it was used, and its block's number.
        self._queue_of = bytearray()
        self._used_at = array("q")
        self._keys = array("Q")
        self._n = 0
        #: Uses of the cache so far.
        self._now = 0
        #: By queue: how many were used again, how many evicted.
        self._used_again = [1.0] * (self._MAX_USES + 1)
        self._evicted = [1.0] * (self._MAX_USES + 1)
        self._memory = GhostTable()

    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        extend_columns(row, self._used_at, self._keys)
        self._queue_of.extend(bytes(len(self._keys) - len(self._queue_of)))
        self._keys[row] = key
        self._n += 1
        self._memory.make_room(self._n)
        known = self._memory.recall(key)
        self._append(row, self._next(known) if known else self._TAIL if tail else 1)

    def touch(self, row: int) -> None:
        """See `EvictionPolicy.touch`."""
        queue = self._take(row, self._used_again)
        self._append(row, self._next(max(queue, 1)))

    def remove(self, row: int) -> None:
        """See `EvictionPolicy.remove`."""
        queue = self._take(row, self._evicted)
        self._memory.remember(self._keys[row], max(queue, 1))
        self._n -= 1

    def candidates(self) -> Iterator[int]:
        """See `EvictionPolicy.candidates`."""
        waiting = (self._by_wait(queue) for queue in range(self._MAX_USES + 1))
        return (row for _, row in merge(*waiting, key=_wait_of, reverse=True))

    def __len__(self) -> int:
        return self._n

    def _by_wait(self, queue: int) -> Iterator[tuple[float, int]]:
        """The longest wait for its worth first."""
        patience = self._patience(queue)
        for row in self._queues.rows(queue):
            yield (self._now - self._used_at[row]) / patience, row

    def _patience(self, queue: int) -> float:
        patience = sqrt(self._share_used_again(queue) / self._share_used_again(1))
        return min(patience, 1.0) if queue == self._TAIL else patience

    def _share_used_again(self, queue: int) -> float:
        return self._used_again[queue] / (self._used_again[queue] + self._evicted[queue])

    def _learn(self, queue: int, outcomes: list[float]) -> None:
        outcomes[queue] += 1
        if self._used_again[queue] + self._evicted[queue] > self._HALF_LIFE:
            self._used_again[queue] /= 2
            self._evicted[queue] /= 2

    def _next(self, uses: int) -> int:
        return min(uses + 1, self._MAX_USES)

    def _append(self, row: int, queue: int) -> None:
        self._now += 1
        self._queue_of[row] = queue
        self._used_at[row] = self._now
        self._queues.append(queue, row)

    def _take(self, row: int, outcomes: list[float]) -> int:
        """A wait has ended; the queue in which it was."""
        queue = self._queue_of[row]
        self._queues.remove(queue, row)
        self._learn(queue, outcomes)
        return queue


def _wait_of(waiting: tuple[float, object]) -> float:
    return waiting[0]
