"""Learn how long blocks are worth keeping, and evict by that.

LRU evicts the block with the longest time since its last use. Here that time is first divided by
a patience, one for each number of uses. A conversation that came back is likelier to come back
again; how much likelier depends on the traffic and on the cache's size. So the policy learns it:
the share of blocks used twice, say, that was used again before eviction, over that share of new
blocks.

    patience    1                      used once
                √(share / share of 1)  used 2, 3, … 8 times or more; and:
                the same, at most 1    the last one of its prompt, not used again yet

The root is taken because returns become rarer about with the square of the waiting time. Then four
times the share is worth twice the wait.

A prompt's last block often ends where no other prompt continues, hence its own share. The uses of
an evicted block are remembered for a while (`GhostTable`): a block that returns soon is not new.
Waiting is counted in uses of the cache, so the policy needs no clock.
"""

from array import array
from collections.abc import Iterator
from heapq import merge
from math import sqrt

from halfmoon_scheduling.cache.eviction_policy import EvictionPolicy
from halfmoon_scheduling.cache.row_queues import RowQueues, extend_columns


class GhostTable:
    """Remember the uses of evicted blocks in four bytes each; the latest overwrite others.

    A block's cell, and the tag that tells it from others there, are both bits of its number.
    """

    #: Cells for each block that the cache holds.
    _PER_BLOCK = 4
    _SCATTER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
    _TAG_BITS, _USES_BITS = 28, 4

    def __init__(self) -> None:
        #: Tag and uses; 0: empty. The number of cells is a power of two.
        self._cells = array("I", [0]) * 8

    def grow(self, n_blocks: int) -> None:
        """Grow in proportion to the cache's blocks; remembered uses stay."""
        while len(self._cells) < self._PER_BLOCK * n_blocks:
            self._cells *= 2  # the entry of cell i is looked up at i, or half of the table later

    def remember(self, key: int, uses: int) -> None:
        """Remember an evicted block that had been used 1 to 15 times."""
        place, tag = self._find(key)
        self._cells[place] = tag << self._USES_BITS | uses

    def recall(self, key: int) -> int:
        """Return the remembered uses of a block; 0 if they are not known."""
        place, tag = self._find(key)
        cell = self._cells[place]
        return cell % (1 << self._USES_BITS) if cell >> self._USES_BITS == tag else 0

    def _find(self, key: int) -> tuple[int, int]:
        scattered = (key ^ key >> 32) * self._SCATTER % (1 << 64)
        return (scattered >> 8) % len(self._cells), scattered >> (64 - self._TAG_BITS)


class ReuseTimePolicy(EvictionPolicy):
    """Evict the block first whose waiting time is longest for its learned patience."""

    name = "patience"

    _MAX_USES = 8
    #: Queue of tails; the queue of blocks used n times is n.
    _TAIL = 0
    #: Outcomes (used again or evicted) in a queue after which earlier ones count half.
    _HALF_LIFE = 20_000

    def __init__(self) -> None:
        #: One queue per patience, the least recently used row first.
        self._queues: RowQueues[int] = RowQueues()
        #: Queue of each row, time of its last use, and its block's number.
        self._queue_of = bytearray()
        self._used_at = array("q")
        self._keys = array("Q")
        self._n = 0
        #: Uses of the cache so far.
        self._now = 0
        #: Rows that were used again, and that were evicted, by queue.
        self._used_again = [1.0] * (self._MAX_USES + 1)
        self._evicted = [1.0] * (self._MAX_USES + 1)
        self._memory = GhostTable()

    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        extend_columns(row, self._used_at, self._keys)
        self._queue_of.extend(bytes(len(self._keys) - len(self._queue_of)))
        self._keys[row] = key
        self._n += 1
        self._memory.grow(self._n)
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
        """Yield a queue's rows with their waits over its patience, the longest first."""
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
        """Remove a row from its queue, learn the outcome, and return the queue."""
        queue = self._queue_of[row]
        self._queues.remove(queue, row)
        self._learn(queue, outcomes)
        return queue


def _wait_of(waiting: tuple[float, object]) -> float:
    return waiting[0]
