"""Which kvstore holds which blocks: the conductor's soft copy of the kvstores' own records.

`PrefixIndex` answers how long a prefix each kvstore holds; `KvEventFollower` keeps it true by
following each kvstore's numbered events, and says when only a snapshot can help.

Memory: one dict entry per block, whose value is a set of workers as the bits of an integer.
Equal sets are one object (most blocks are held by one kvstore), so a block costs its 16-byte
hash and a dict entry, about 110 bytes, however many workers there are.
"""

from collections.abc import Iterable, Iterator, Sequence

from halfmoon_protocol.ids import BlockHash, WorkerId


class PrefixIndex:
    """Blocks to the workers that hold them, and prefixes to their lengths."""

    def __init__(self) -> None:
        #: Bit i of a value: the worker of slot i holds the block. No value is 0, and equal
        #: values are one object, the one in `_sets`.
        self._holders: dict[BlockHash, int] = {}
        #: Each set in use, and by how many blocks.
        self._sets: dict[int, tuple[int, int]] = {}
        #: Slot of each worker that holds anything.
        self._slots: dict[WorkerId, int] = {}
        #: The reverse; None is a slot to use again.
        self._workers: list[WorkerId | None] = []
        #: Blocks of each worker in `_slots`; never 0.
        self._n_blocks: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return len(self._holders)

    def n_blocks(self, worker: WorkerId) -> int:
        """Blocks that this worker holds."""
        return self._n_blocks.get(worker, 0)

    def n_holders(self, block: BlockHash) -> int:
        """How many hold this block."""
        return self._holders.get(block, 0).bit_count()

    def holders(self, block: BlockHash) -> Iterator[WorkerId]:
        """Those that hold this block; hold it no longer than until the index changes."""
        return self._members(self._holders.get(block, 0))

    def add(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these now; again is fine."""
        bit = 1 << self._slot(worker)
        added = 0
        for block in hashes:
            before = self._holders.get(block, 0)
            if not before & bit:
                self._set(block, before, before | bit)
                added += 1
        self._count(worker, added)

    def remove(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these no more; not having held them is fine."""
        if (slot := self._slots.get(worker)) is None:
            return
        bit = 1 << slot
        gone = 0
        for block in hashes:
            before = self._holders.get(block, 0)
            if before & bit:
                self._set(block, before, before & ~bit)
                gone += 1
        self._count(worker, -gone)

    def clear(self, worker: WorkerId) -> None:
        """The worker holds nothing any more. Walks all blocks once if it held some."""
        if (slot := self._slots.get(worker)) is not None:
            bit = 1 << slot
            self.remove(worker, [block for block, held in self._holders.items() if held & bit])

    def replace(self, worker: WorkerId, hashes: Iterable[BlockHash]) -> None:
        """The worker holds these and nothing else."""
        self.clear(worker)
        self.add(worker, hashes)

    def drop(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self.clear(worker)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """For each worker that holds the first block: how many it holds without a gap.

        One walk for all of them, to the first block that none of those left holds.
        """
        lengths: dict[WorkerId, int] = {}
        left = self._holders.get(hashes[0], 0) if hashes else 0
        length = 0
        while left:
            length += 1
            following = self._holders.get(hashes[length], 0) & left if length < len(hashes) else 0
            if following != left:
                for worker in self._members(left & ~following):
                    lengths[worker] = length
            left = following
        return lengths

    def check(self) -> None:
        """Audit: counts, sets and slots say the same."""
        counts: dict[int, int] = {}
        per_worker: dict[WorkerId, int] = {}
        for held in self._holders.values():
            assert held, "a block without holders is kept"
            assert self._sets[held][0] is held, "equal sets are two objects"
            counts[held] = counts.get(held, 0) + 1
            for worker in self._members(held):
                per_worker[worker] = per_worker.get(worker, 0) + 1
        assert counts == {held: n for held, (_, n) in self._sets.items()}
        assert per_worker == self._n_blocks
        assert self._slots.keys() == self._n_blocks.keys(), "a slot is kept without blocks"
        assert self._slots == {w: i for i, w in enumerate(self._workers) if w is not None}

    def _slot(self, worker: WorkerId) -> int:
        if (slot := self._slots.get(worker)) is not None:
            return slot
        if None in self._workers:
            slot = self._workers.index(None)
            self._workers[slot] = worker
        else:
            slot = len(self._workers)
            self._workers.append(worker)
        self._slots[worker] = slot
        self._n_blocks[worker] = 0
        return slot

    def _count(self, worker: WorkerId, change: int) -> None:
        self._n_blocks[worker] += change
        if self._n_blocks[worker] == 0:
            del self._n_blocks[worker]
            self._workers[self._slots.pop(worker)] = None

    def _set(self, block: BlockHash, before: int, after: int) -> None:
        if before:
            same, n = self._sets[before]
            if n == 1:
                del self._sets[before]
            else:
                self._sets[before] = (same, n - 1)
        if after:
            same, n = self._sets.get(after, (after, 0))
            self._sets[same] = (same, n + 1)
            self._holders[block] = same
        else:
            del self._holders[block]

    def _members(self, held: int) -> Iterator[WorkerId]:
        while held:
            lowest = held & -held
            worker = self._workers[lowest.bit_length() - 1]
            assert worker is not None, "a block is held by nobody's slot"
            yield worker
            held ^= lowest
