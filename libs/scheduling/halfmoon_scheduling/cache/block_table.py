"""Store the facts about a tier's blocks in columns, about 120 bytes for each block.

A row is kept for each block that is here, and for each parent of such a block. So a child names
its parent by a row of four bytes, even if the parent is not here.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.row_index import NO_ROW, RowIndex

#: The largest checksum: 64 bits.
MAX_CHECKSUM = (1 << 64) - 1


class BlockTable:
    """Keep blocks and their slots. Only blocks that are here have a slot and are counted."""

    def __init__(self) -> None:
        self._index = RowIndex()
        #: The slot of each block; `NO_ROW`: only its children are here.
        self._slots = array("i")
        self._parents = array("i")
        self._depths = array("I")
        self._checksums = array("Q")
        #: Children of each block that are here, or held (see `hold_parent`).
        self._n_children = array("i")
        #: The child added last; it may have been removed, and its row used again.
        self._last_child = array("i")
        self._n_here = 0

    def __len__(self) -> int:
        """Return the number of blocks that are here."""
        return self._n_here

    def __contains__(self, block: object) -> bool:
        return isinstance(block, bytes) and self.row(BlockHash(block)) != NO_ROW

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of all blocks that are here."""
        return (row for row, slot in enumerate(self._slots) if slot != NO_ROW)

    def row(self, block: BlockHash) -> int:
        """Return the row of a block that is here, or `NO_ROW`."""
        row = self._index.find(block)
        return row if row != NO_ROW and self._slots[row] != NO_ROW else NO_ROW

    def rows(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the rows of these blocks, up to the first one that is not here."""
        rows, slots = self._index.find_run(blocks), self._slots
        for i, row in enumerate(rows):
            if slots[row] == NO_ROW:
                return rows[:i]
        return rows

    def row_of_each(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the row of each of these blocks, or `NO_ROW` if it is not here."""
        slots = self._slots
        return [
            row if row != NO_ROW and slots[row] != NO_ROW else NO_ROW
            for row in self._index.find_each(blocks)
        ]

    def columns(self, rows: Sequence[int]) -> tuple[list[BlockHash], Iterable[int], Iterable[int]]:
        """Return hashes, slots and checksums of blocks that are here, by their rows."""
        slots, checksums = self._slots, self._checksums
        return (
            self._index.hashes(rows),
            map(slots.__getitem__, rows),
            map(checksums.__getitem__, rows),
        )

    # -- facts about a block that is here, by its row ----------------------------------------

    def block(self, row: int) -> BlockHash:
        """Return the hash of a block."""
        return self._index[row]

    def slot(self, row: int) -> int:
        """Return the slot of a block."""
        return self._slots[row]

    def checksum(self, row: int) -> int:
        """Return the xxh3-64 of a block's bytes."""
        return self._checksums[row]

    def depth(self, row: int) -> int:
        """Return the number of blocks before a block in its prompt."""
        return self._depths[row]

    def parent(self, row: int) -> BlockHash | None:
        """Return the block before a block, even if that is not here."""
        parent = self._parents[row]
        return None if parent == NO_ROW else self._index[parent]

    # -- children ----------------------------------------------------------------------------

    def n_children(self, block: BlockHash) -> int:
        """Return the number of a block's children that are here or held; it may be absent."""
        row = self._index.find(block)
        return 0 if row == NO_ROW else self._n_children[row]

    def last_child(self, block: BlockHash) -> BlockHash | None:
        """Return the child of a block that was added last, if it is still here."""
        row = self._index.find(block)
        if row == NO_ROW or not self._n_children[row]:
            return None
        child = self._last_child[row]
        is_here = child != NO_ROW and self._slots[child] != NO_ROW and self._parents[child] == row
        return self._index[child] if is_here else None

    def hold_parent(self, parent: BlockHash | None) -> int:
        """Count a child that is not here, and return the parent's row, or `NO_ROW`."""
        if parent is None:
            return NO_ROW
        row = self._index.find(parent)
        if row == NO_ROW:
            row = self._new_row(parent)
        self._n_children[row] += 1
        return row

    def release_parent(self, parent: BlockHash | None) -> None:
        """Stop counting a child that was held."""
        if parent is not None:
            self._release_row(self._index.find(parent))

    # -- coming and going --------------------------------------------------------------------

    def add(
        self, block: BlockHash, parent: BlockHash | None, depth: int, checksum: int, slot: int
    ) -> int:
        """Add a block that is not here, and return its row."""
        row = self._index.find(block)
        if row == NO_ROW:
            row = self._new_row(block)
        self._slots[row] = slot
        self._depths[row] = depth
        self._checksums[row] = checksum
        self._n_here += 1
        above = self._parents[row] = self.hold_parent(parent)
        if above != NO_ROW:
            self._last_child[above] = row
        return row

    def remove(self, row: int) -> int:
        """Remove a block, and return its slot."""
        slot = self._slots[row]
        self._slots[row] = NO_ROW
        self._n_here -= 1
        parent = self._parents[row]
        if not self._n_children[row]:
            self._index.remove(row)
        if parent != NO_ROW:
            self._release_row(parent)
        return slot

    def check(self, held: Mapping[BlockHash, int]) -> None:
        """Check that each row is needed, and that children are counted.

        Args:
            held: the number of held children of each block.
        """
        self._index.check()
        rows = list(self)
        assert len(rows) == self._n_here
        counts = dict(held)
        for row in rows:
            if (parent := self.parent(row)) is not None:
                counts[parent] = counts.get(parent, 0) + 1
        assert len(self._index) == len({*map(self.block, rows), *counts}), "rows of nothing"
        assert all(self.n_children(block) == n for block, n in counts.items())
        assert sum(self._n_children[self._index.find(b)] for b in counts) == sum(counts.values())
        assert all(
            self.n_children(self.block(row)) == counts.get(self.block(row), 0) for row in rows
        ), "children are miscounted"

    def _new_row(self, block: BlockHash) -> int:
        row = self._index.add(block)
        if row == len(self._slots):
            for column in (
                self._slots, self._parents, self._depths, self._checksums, self._n_children,
                self._last_child,
            ):  # fmt: skip
                column.append(0)
        self._slots[row] = self._last_child[row] = NO_ROW
        self._n_children[row] = 0
        return row

    def _release_row(self, row: int) -> None:
        self._n_children[row] -= 1
        if not self._n_children[row] and self._slots[row] == NO_ROW:
            self._index.remove(row)


def policy_key(block: BlockHash) -> int:
    """Return a block's number for policies that remember evicted blocks."""
    return int.from_bytes(block[-8:], "little")
