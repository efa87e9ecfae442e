"""Map blocks to slots of a disk, the slower tier of a kvstore.

The service owns the bytes. A slot is in exactly one of three states:

    free ──allocate──▶ held (being written) ──store──▶ stored ──allocate (evicts)──▶ held
      ▲                    │                              │
      └──────release───────┘◀───────────forget────────────┘

As in memory, a block is evicted only after its children, in either tier.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.block_table import BlockTable, policy_key
from halfmoon_scheduling.cache.eviction_policies import open_eviction_policy
from halfmoon_scheduling.cache.row_index import NO_ROW


class BlockRecord(msgspec.Struct, frozen=True):
    """The facts about a block on the disk that are needed to serve it after a restart."""

    hash: BlockHash
    #: The block before it in its prompt.
    parent: BlockHash | None
    #: Blocks before it in its prompt.
    depth: int
    #: xxh3-64 of its bytes.
    checksum: int


class DiskBlock(msgspec.Struct, frozen=True):
    """A block on the disk, and its slot."""

    record: BlockRecord
    slot: int


class DiskMap:
    """Slots of equal size, one block each."""

    def __init__(self, n_slots: int, *, policy: str = "lru") -> None:
        """Start with an empty disk.

        Raises:
            ValueError: an unknown policy.
        """
        self.n_slots = n_slots
        #: Free slots, the next one to use last.
        self._free = array("i", range(n_slots - 1, -1, -1))
        #: Slots being written or erased. Disjoint from `_free` and from stored blocks' slots.
        self._held: set[int] = set()
        self._table = BlockTable()
        #: Orders exactly the rows of `_table`.
        self._policy = open_eviction_policy(policy)

    def __len__(self) -> int:
        """Return the number of blocks on the disk."""
        return len(self._table)

    def __contains__(self, block: object) -> bool:
        return block in self._table

    def get(self, block: BlockHash) -> DiskBlock | None:
        """Return a block and its slot; None if it is not here."""
        table = self._table
        if (row := table.row(block)) == NO_ROW:
            return None
        record = BlockRecord(block, table.parent(row), table.depth(row), table.checksum(row))
        return DiskBlock(record, table.slot(row))

    def hashes(self) -> list[BlockHash]:
        """Return all blocks."""
        return [self._table.block(row) for row in self._table]

    def has_children(self, block: BlockHash) -> bool:
        """Return whether a child of this block is here, even if the block is not."""
        return self._table.n_children(block) > 0

    def successor(self, block: BlockHash) -> BlockHash | None:
        """Return the child of this block that was stored last, if it is still here."""
        return self._table.last_child(block)

    def touch(self, blocks: Sequence[BlockHash]) -> None:
        """Record a use of those of a prompt's blocks that are here; the first are evicted last."""
        if self._table:
            rows = map(self._table.row, reversed(blocks))
            self._policy.touch_all([row for row in rows if row != NO_ROW])

    def allocate(self, busy: Callable[[BlockHash], bool]) -> tuple[int | None, BlockHash | None]:
        """Take a slot to write to.

        Args:
            busy: tells whether a block must stay.

        Returns:
            The slot, or None if there is none; and the block that was evicted for it, if any.
        """
        if self._free:
            slot = self._free.pop()
            self._held.add(slot)
            return slot, None
        for row in self._policy.candidates():
            block = self._table.block(row)
            if not self.has_children(block) and not busy(block):
                return self.forget(block), block
        return None, None

    def store(self, slot: int, record: BlockRecord) -> None:
        """Record that a held slot holds this block now; no other slot does."""
        self._held.remove(slot)
        self._keep(slot, record)

    def restore(self, found: Iterable[DiskBlock]) -> None:
        """Take over blocks found in free slots after a restart; the last duplicate counts."""
        for each in found:
            if each.record.hash in self._table:
                self._held.discard(self.forget(each.record.hash))
            self._keep(each.slot, each.record)
        taken = bytearray(self.n_slots)
        for row in self._table:
            taken[self._table.slot(row)] = True
        for slot in self._held:
            taken[slot] = True
        self._free = array("i", (i for i in range(self.n_slots - 1, -1, -1) if not taken[i]))

    def grow(self, n_slots: int) -> None:
        """Add free slots behind the present ones."""
        self._free = (
            array("i", range(self.n_slots + n_slots - 1, self.n_slots - 1, -1)) + self._free
        )
        self.n_slots += n_slots

    def release(self, slot: int) -> None:
        """Free a held slot; it will be the last one to be used again."""
        self._held.remove(slot)
        self._free.insert(0, slot)

    def forget(self, block: BlockHash) -> int:
        """Remove a block and return its slot, which is held from now on."""
        row = self._table.row(block)
        self._policy.remove(row)
        slot = self._table.remove(row)
        self._held.add(slot)
        return slot

    def check(self) -> None:
        """Check that every slot is in one state, and that all counts are right."""
        rows = list(self._table)
        slots = [*self._free, *self._held, *map(self._table.slot, rows)]
        assert sorted(slots) == list(range(self.n_slots)), "a slot is lost or held twice"
        assert sorted(self._policy.candidates()) == rows, "policy differs"
        self._table.check(held={})

    def _keep(self, slot: int, record: BlockRecord) -> None:
        row = self._table.add(record.hash, record.parent, record.depth, record.checksum, slot)
        self._policy.insert(row, policy_key(record.hash), record.depth)
