"""Number block hashes: map each hash to a row and back, in flat memory.

A million blocks take 85 MB, hashes included; a dict from hashes to numbers would take 140 MB. A
row is a small number, so all other facts about a block lie in columns: arrays with one value per
row. Rows of removed hashes are used again.

The table uses open addressing: a row lies at its hash's home, or in the next empty place.

    table   | · | 4 | 0 | · | 2 |      places; 0 shares 4's home and lies behind it
    hashes  0: b"…"  2: b"…"  4: b"…"  by row
"""

from array import array
from collections.abc import Iterable

from halfmoon_protocol.ids import BlockHash

#: Stands for "no row".
NO_ROW = -1
_SMALLEST = 8


class RowIndex:
    """Map block hashes to rows and back."""

    def __init__(self) -> None:
        #: Hashes by row; None where the row is free.
        self._hashes: list[BlockHash | None] = []
        self._free = array("i")
        #: Rows by place, or `NO_ROW`. The length is a power of two; at most two thirds are used.
        self._table = array("i", [NO_ROW]) * _SMALLEST

    def __len__(self) -> int:
        """Return the number of hashes."""
        return len(self._hashes) - len(self._free)

    def __getitem__(self, row: int) -> BlockHash:
        """Return the hash of a row in use."""
        block = self._hashes[row]
        assert block is not None, f"row {row} is free"
        return block

    def hashes(self, rows: Iterable[int]) -> list[BlockHash]:
        """Return the hashes of rows in use."""
        hashes = self._hashes
        return [block for row in rows if (block := hashes[row]) is not None]

    def find(self, block: BlockHash) -> int:
        """Return the row of a hash, or `NO_ROW`."""
        return self._table[self._place(block)]

    def find_run(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the rows of these hashes, up to the first one that has none."""
        # As `find` for each, without its calls: readers ask for hundreds of blocks at once.
        table, hashes, last = self._table, self._hashes, len(self._table) - 1
        rows: list[int] = []
        for block in blocks:
            place = hash(block) & last
            while (row := table[place]) != NO_ROW and hashes[row] != block:
                place = (place + 1) & last
            if row == NO_ROW:
                break
            rows.append(row)
        return rows

    def find_each(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the row of each of these hashes, or `NO_ROW`."""
        table, hashes, last = self._table, self._hashes, len(self._table) - 1
        rows: list[int] = []
        for block in blocks:
            place = hash(block) & last
            while (row := table[place]) != NO_ROW and hashes[row] != block:
                place = (place + 1) & last
            rows.append(row)
        return rows

    def add(self, block: BlockHash) -> int:
        """Assign a row to a hash that has none, and return it."""
        if 3 * len(self._hashes) >= 2 * len(self._table) and not self._free:
            self._double()
        place = self._place(block)
        assert self._table[place] == NO_ROW, "a hash has one row"
        if self._free:
            row = self._free.pop()
            self._hashes[row] = block
        else:
            row = len(self._hashes)
            self._hashes.append(block)
        self._table[place] = row
        return row

    def remove(self, row: int) -> None:
        """Remove the hash of a row, and free the row."""
        self._close_gap(self._place(self[row]))
        self._hashes[row] = None
        self._free.append(row)

    def check(self) -> None:
        """Check that every hash is found at its row, and nothing else is."""
        rows = {row for row, block in enumerate(self._hashes) if block is not None}
        assert sorted([*rows, *self._free]) == list(range(len(self._hashes)))
        assert sorted(row for row in self._table if row != NO_ROW) == sorted(rows)
        assert all(self.find(self[row]) == row for row in rows), "a hash is not found"

    def _place(self, block: BlockHash) -> int:
        """Return the place of a hash's row, or the empty place where it would lie."""
        table, hashes, last = self._table, self._hashes, len(self._table) - 1
        place = hash(block) & last
        while (row := table[place]) != NO_ROW and hashes[row] != block:
            place = (place + 1) & last
        return place

    def _close_gap(self, gap: int) -> None:
        """Empty a place, and move up the rows behind it, but none before its home."""
        table, last = self._table, len(self._table) - 1
        place = (gap + 1) & last
        while (row := table[place]) != NO_ROW:
            home = hash(self._hashes[row]) & last
            if (place - home) & last >= (place - gap) & last:
                table[gap] = row
                gap = place
            place = (place + 1) & last
        table[gap] = NO_ROW

    def _double(self) -> None:
        self._table = array("i", [NO_ROW]) * (2 * len(self._table))
        for row, block in enumerate(self._hashes):
            if block is not None:
                self._table[self._place(block)] = row
