"""Store the blocks of a memory as rows: slots, leases and eviction order."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.block_table import BlockTable, policy_key
from halfmoon_scheduling.cache.eviction_policies import open_eviction_policy
from halfmoon_scheduling.cache.row_index import NO_ROW
from halfmoon_scheduling.cache.row_queues import extend_columns


class BlockLocation(msgspec.Struct, frozen=True, gc=False):
    """One stored block as a reader needs it."""

    hash: BlockHash
    slot: int
    checksum: int


class StoredBlock(NamedTuple):
    """A stored block as it is now."""

    slot: int
    checksum: int
    parent: BlockHash | None
    #: Blocks before it in its prompt that were here when it was stored.
    depth: int
    #: When it was stored; the same for all blocks of a commit.
    stored_s: float
    n_leases: int
    #: Whether a slower tier has it too.
    saved: bool


class StoredBlocks:
    """Keep stored blocks by their hashes."""

    def __init__(self, policy: str) -> None:
        """Start without blocks.

        Raises:
            ValueError: no such eviction policy; the message lists those that there are.
        """
        self._table = BlockTable()
        #: Orders exactly the rows of `_table`.
        self._policy = open_eviction_policy(policy)
        self._n_leases = array("I")
        self._saved = array("b")
        self._stored_s = array("d")
        #: Blocks with at least one lease.
        self.n_leased = 0

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, block: object) -> bool:
        return block in self._table

    def __iter__(self) -> Iterator[BlockHash]:
        return map(self._table.block, self._table)

    def __getitem__(self, block: BlockHash) -> StoredBlock:
        return self._snapshot(self._row(block))

    def get(self, block: BlockHash) -> StoredBlock | None:
        """Return a block, if it is here."""
        row = self._table.row(block)
        return None if row == NO_ROW else self._snapshot(row)

    def rows(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the rows of these blocks, up to the first one that is not here.

        A row names its block while the block stays: a lease keeps both.
        """
        return self._table.rows(blocks)

    def rows_here(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the rows of those of these blocks that are here."""
        return [row for row in self._table.row_of_each(blocks) if row != NO_ROW]

    def absent(self, blocks: Collection[BlockHash]) -> list[BlockHash]:
        """Return those of these blocks that are not here, in order."""
        rows = self._table.row_of_each(blocks)
        return [block for block, row in zip(blocks, rows, strict=True) if row == NO_ROW]

    def block(self, row: int) -> BlockHash:
        """Return the block of a row."""
        return self._table.block(row)

    def locations(self, rows: Sequence[int]) -> list[BlockLocation]:
        """Return where blocks are, by their rows."""
        return list(map(BlockLocation, *self._table.columns(rows)))

    def candidates(self) -> Iterator[BlockHash]:
        """Yield all blocks in eviction order. Leave them unchanged while iterating."""
        return map(self._table.block, self._policy.candidates())

    def n_children(self, block: BlockHash) -> int:
        """Return the number of a block's children that are here or awaited; it may be absent."""
        return self._table.n_children(block)

    def await_child(self, parent: BlockHash | None) -> None:
        """Count a child of a block that is about to be stored."""
        self._table.hold_parent(parent)

    def cancel_await_child(self, parent: BlockHash | None) -> None:
        """Stop counting an awaited child, because it was stored or will not be."""
        self._table.release_parent(parent)

    def add(
        self, block: BlockHash, parent: BlockHash | None, depth: int, checksum: int, slot: int,
        stored_s: float, *, tail: bool,
    ) -> None:  # fmt: skip
        """Store a block that is not here; `tail` says that it is the last one of its prompt."""
        row = self._table.add(block, parent, depth, checksum, slot)
        extend_columns(row, self._n_leases, self._saved, self._stored_s)
        self._n_leases[row], self._saved[row], self._stored_s[row] = 0, False, stored_s
        self._policy.insert(row, policy_key(block), depth, tail=tail)

    def remove(self, block: BlockHash) -> int:
        """Remove a block, and return its slot."""
        row = self._row(block)
        self._policy.remove(row)
        return self._table.remove(row)

    def touch(self, rows: Sequence[int]) -> None:
        """Record a use of a prompt's blocks, by their rows; the first are the last to evict."""
        self._policy.touch_all(rows[::-1])

    def add_leases(self, rows: Sequence[int]) -> None:
        """Count one more lease on each block, by their rows."""
        n_leases, n_first = self._n_leases, 0
        for row in rows:
            n_first += not n_leases[row]
            n_leases[row] += 1
        self.n_leased += n_first

    def remove_leases(self, rows: Sequence[int]) -> None:
        """Count one lease less on each block, by their rows."""
        n_leases, n_last = self._n_leases, 0
        for row in rows:
            n_leases[row] -= 1
            n_last += not n_leases[row]
        self.n_leased -= n_last

    def mark_saved(self, block: BlockHash) -> None:
        """Mark a block as stored in a slower tier too."""
        self._saved[self._row(block)] = True

    def check(self, awaited: "Counter[BlockHash]") -> None:
        """Check all counts, and that the policy orders exactly the stored blocks.

        Args:
            awaited: the number of awaited children of each block.
        """
        rows = list(self._table)
        self._table.check(awaited)
        assert sorted(self._policy.candidates()) == rows, "policy differs"
        assert self.n_leased == sum(self._n_leases[row] > 0 for row in rows)

    def _row(self, block: BlockHash) -> int:
        row = self._table.row(block)
        if row == NO_ROW:
            raise KeyError(block)
        return row

    def _snapshot(self, row: int) -> StoredBlock:
        table = self._table
        return StoredBlock(
            table.slot(row), table.checksum(row), table.parent(row), table.depth(row),
            self._stored_s[row], self._n_leases[row], bool(self._saved[row]),
        )  # fmt: skip
