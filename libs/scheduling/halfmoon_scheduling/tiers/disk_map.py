"""Which slot of a disk holds which block: a kvstore's slower tier, as numbers.

The bytes are the service's. A slot is in exactly one of three states:

    free ──allocate──▶ held (being written) ──store──▶ stored ──allocate (evicts)──▶ held
      ▲                    │                              │
      └──────release───────┘◀───────────forget────────────┘

As in memory, a block goes only after its children, be they here or above.
"""

from array import array
from collections.abc import Callable, Iterable

import msgspec

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.block_table import BlockTable, policy_key
from halfmoon_scheduling.cache.eviction_policies import open_eviction_policy
from halfmoon_scheduling.cache.row_index import NO_ROW


class BlockRecord(msgspec.Struct, frozen=True):
    """What a disk knows of a block: enough to serve it again after a restart."""

    hash: BlockHash
    #: The block before it in its prompt.
    parent: BlockHash | None
    #: Blocks before it in its prompt.
    depth: int
    #: xxh3-64 of its bytes.
    checksum: int


class DiskBlock(msgspec.Struct, frozen=True):
    """A block that is on the disk, and where."""

    record: BlockRecord
    slot: int


class DiskMap:
    """Equal slots of one block each."""

    def __init__(self, n_slots: int, *, policy: str = "lru") -> None:
        """An empty disk.

        Raises:
            ValueError: an unknown policy.
        """
        self.n_slots = n_slots
        #: Slots of no block, the next one to use last.
        self._free = array("i", range(n_slots - 1, -1, -1))
        #: Slots that are written to, or erased. Disjoint from `_free` and from stored blocks'.
        self._held: set[int] = set()
        self._table = BlockTable()
        #: Orders exactly the rows of `_table`.
        self._policy = open_eviction_policy(policy)

    def __len__(self) -> int:
        """Blocks on the disk."""
        return len(self._table)

    def __contains__(self, block: object) -> bool:
        return block in self._table

    def get(self, block: BlockHash) -> DiskBlock | None:
        """A block, if it is here."""
        table = self._table
        if (row := table.row(block)) == NO_ROW:
            return None
        record = BlockRecord(block, table.parent(row), table.depth(row), table.checksum(row))
        return DiskBlock(record, table.slot(row))

    def hashes(self) -> list[BlockHash]:
        """All blocks."""
        return [self._table.block(row) for row in self._table]

    def has_children(self, block: BlockHash) -> bool:
        """Whether a child of this block is here, be the block here or not."""
        return self._table.n_children(block) > 0

    def successor(self, block: BlockHash) -> BlockHash | None:
        """The child of this block that came here last, if it still is here."""
        return self._table.last_child(block)

    def touch(self, block: BlockHash) -> None:
        """A block was asked for; not being here is fine."""
        if (row := self._table.row(block)) != NO_ROW:
            self._policy.touch(row)

    def allocate(self, busy: Callable[[BlockHash], bool]) -> tuple[int | None, BlockHash | None]:
        """Take a slot to write to.

        Args:
            busy: which blocks must stay.

        Returns:
            The slot, None if there is none; and the block that went for it, if one did.
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
        """A held slot holds this block now, which is nowhere else on the disk."""
        self._held.remove(slot)
        self._keep(slot, record)

    def restore(self, found: Iterable[DiskBlock]) -> None:
        """These were found in free slots after a restart; of one found twice the last counts."""
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

    def release(self, slot: int) -> None:
        """A held slot holds nothing; it is the last to be used again."""
        self._held.remove(slot)
        self._free.insert(0, slot)

    def forget(self, block: BlockHash) -> int:
        """A block is not on the disk any more; its slot, which is held."""
        row = self._table.row(block)
        self._policy.remove(row)
        slot = self._table.remove(row)
        self._held.add(slot)
        return slot

    def check(self) -> None:
        """Audit: every slot in one state, every count what it counts."""
        rows = list(self._table)
        slots = [*self._free, *self._held, *map(self._table.slot, rows)]
        assert sorted(slots) == list(range(self.n_slots)), "a slot is lost or held twice"
        assert sorted(self._policy.candidates()) == rows, "policy differs"
        self._table.check(held={})

    def _keep(self, slot: int, record: BlockRecord) -> None:
        row = self._table.add(record.hash, record.parent, record.depth, record.checksum, slot)
        self._policy.insert(row, policy_key(record.hash), record.depth)
