"""Index which kvstore holds which blocks: the conductor's copy of the kvstores' own records.

`PrefixIndex` tells how long a prefix each kvstore holds. `kv_event_follower` keeps it up to date.

Memory: one dict entry per block, with a set of workers as the bits of an integer. Equal sets are
one object, since most blocks are held by one kvstore. So a block costs its 16-byte hash and a dict
entry, about 110 bytes, for any number of workers.

A worker that is cleared loses its slot at once, and its bits count no more. `sweep` removes them
from the blocks, a piece at a time, since there may be a million.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from halfmoon_protocol.ids import BlockHash, WorkerId


class PrefixIndex:
    """Map blocks to the workers that hold them, and prefixes to their lengths."""

    def __init__(self) -> None:
        #: Bit i of a value: the worker of slot i holds the block, or held it and was cleared. No
        #: value is 0, and equal values are one object, the one in `_sets`.
        self._holders: dict[BlockHash, int] = {}
        #: Each set in use, and the number of blocks with it.
        self._sets: dict[int, tuple[int, int]] = {}
        #: Slot of each worker that holds blocks.
        self._slots: dict[WorkerId, int] = {}
        #: Workers by slot; None is a slot to use again, or one in `_dead`.
        self._workers: list[WorkerId | None] = []
        #: Bits of the slots whose workers were cleared, and whose blocks may still have them.
        self._dead = 0
        #: Those of them that the sweep under way removes, and the blocks that it has yet to visit.
        self._sweeping = 0
        self._to_sweep: list[BlockHash] = []
        #: Blocks of each worker in `_slots`; never 0.
        self._n_blocks: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        """Return the number of blocks with a holder."""
        if not self._dead:
            return len(self._holders)
        return sum(n for held, n in self._sets.values() if held & ~self._dead)

    def n_blocks(self, worker: WorkerId) -> int:
        """Return the number of blocks that this worker holds."""
        return self._n_blocks.get(worker, 0)

    def n_holders(self, block: BlockHash) -> int:
        """Return the number of holders of a block."""
        return self._held(block).bit_count()

    def holders(self, block: BlockHash) -> Iterator[WorkerId]:
        """Yield the holders of a block. Leave the index unchanged meanwhile."""
        return self._members(self._held(block))

    def add(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """Add a worker as the holder of blocks; it may hold some already."""
        bit = 1 << self._slot(worker)
        self._count(worker, self._change(hashes, lambda held: held | bit))

    def remove(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """Remove a worker as the holder of blocks; it may not hold some."""
        if (slot := self._slots.get(worker)) is not None:
            others = ~(1 << slot)
            self._count(worker, -self._change(hashes, lambda held: held & others))

    def clear(self, worker: WorkerId) -> None:
        """Remove a worker as the holder of all its blocks, at once; `sweep` frees their memory."""
        if (slot := self._slots.pop(worker, None)) is not None:
            del self._n_blocks[worker]
            self._workers[slot] = None
            self._dead |= 1 << slot

    def sweep(self, n: int) -> bool:
        """Remove cleared workers from up to `n` blocks; return whether blocks are left to visit."""
        if not self._to_sweep:
            if not self._dead:
                return False
            self._sweeping = self._dead
            self._to_sweep = list(self._holders)
        piece = self._to_sweep[-n:]
        del self._to_sweep[-n:]
        others = ~self._sweeping
        self._change([b for b in piece if b in self._holders], lambda held: held & others)
        if not self._to_sweep:
            self._dead &= others
            self._sweeping = 0
        return bool(self._dead)

    def drop(self, worker: WorkerId) -> None:
        """Forget a worker that is gone."""
        self.clear(worker)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Return for each worker that holds the first block how many it holds without a gap.

        One walk serves all of them; it ends at the first block that none of them holds.
        """
        lengths: dict[WorkerId, int] = {}
        left = self._held(hashes[0]) if hashes else 0
        length = 0
        while left:
            length += 1
            held = self._holders.get(hashes[length], 0) if length < len(hashes) else 0
            # Equal sets are one object, and a prompt's blocks often have the same holders. `left`
            # has no cleared ones.
            following = left if held is left else held & left
            if following != left:
                for worker in self._members(left & ~following):
                    lengths[worker] = length
            left = following
        return lengths

    def check(self) -> None:
        """Check that counts, sets and slots agree."""
        counts: dict[int, int] = {}
        per_worker: dict[WorkerId, int] = {}
        for held in self._holders.values():
            assert held, "a block without holders is kept"
            assert self._sets[held][0] is held, "equal sets are two objects"
            counts[held] = counts.get(held, 0) + 1
            for worker in self._members(held & ~self._dead):
                per_worker[worker] = per_worker.get(worker, 0) + 1
        assert counts == {held: n for held, (_, n) in self._sets.items()}
        assert per_worker == self._n_blocks
        assert self._slots.keys() == self._n_blocks.keys(), "a slot is kept without blocks"
        assert self._slots == {w: i for i, w in enumerate(self._workers) if w is not None}
        assert not any(self._dead >> slot & 1 for slot in self._slots.values())
        assert self._sweeping & ~self._dead == 0

    def _slot(self, worker: WorkerId) -> int:
        if (slot := self._slots.get(worker)) is not None:
            return slot
        free = (i for i, each in enumerate(self._workers) if each is None)
        slot = next((i for i in free if not self._dead >> i & 1), len(self._workers))
        if slot == len(self._workers):
            self._workers.append(worker)
        else:
            self._workers[slot] = worker
        self._slots[worker] = slot
        self._n_blocks[worker] = 0
        return slot

    def _count(self, worker: WorkerId, change: int) -> None:
        self._n_blocks[worker] += change
        if self._n_blocks[worker] == 0:
            del self._n_blocks[worker]
            self._workers[self._slots.pop(worker)] = None

    def _change(self, hashes: Iterable[BlockHash], change: Callable[[int], int]) -> int:
        """Change the sets of blocks; return how many blocks have another set than before.

        Most blocks in a row have the same set. Each run of them is computed and counted once,
        since the cost of a set grows with the number of workers.
        """
        n_changed = n_run = 0
        before: int | None = None
        after = 0
        for block in hashes:
            held = self._holders.get(block, 0)
            if held is not before:
                self._recount(before, after, n_run)
                before, n_run = held, 0
                after = self._interned(change(held))
            if after is before:
                continue
            if after:
                self._holders[block] = after
            else:
                del self._holders[block]
            n_run += 1
            n_changed += 1
        self._recount(before, after, n_run)
        return n_changed

    def _held(self, block: BlockHash) -> int:
        held = self._holders.get(block, 0)
        return held & ~self._dead if self._dead else held

    def _interned(self, held: int) -> int:
        """Return the object in use for a set."""
        return self._sets.get(held, (held, 0))[0]

    def _recount(self, before: int | None, after: int, n: int) -> None:
        """Count `n` blocks that have changed from one set to another."""
        if not n:
            return
        if after:
            self._sets[after] = (after, self._sets.get(after, (after, 0))[1] + n)
        if before:
            same, n_before = self._sets[before]
            if n_before == n:
                del self._sets[before]
            else:
                self._sets[before] = (same, n_before - n)

    def _members(self, held: int) -> Iterator[WorkerId]:
        while held:
            lowest = held & -held
            worker = self._workers[lowest.bit_length() - 1]
            assert worker is not None, "a block is held by a free slot"
            yield worker
            held ^= lowest
