"""Keep rows in named queues, linked through two columns: 8 bytes per row.

A row is a small number (see `row_index`). It leaves its queue from any place in constant time.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from halfmoon_scheduling.cache.row_index import NO_ROW

Name = TypeVar("Name", bound=Hashable)


class RowQueues(Generic[Name]):
    """Keep each row in at most one queue; a queue exists while it has rows."""

    def __init__(self) -> None:
        #: First and last row of each queue.
        self._ends: dict[Name, list[int]] = {}
        self._before = array("i")
        self._after = array("i")

    def __contains__(self, name: Name) -> bool:
        return name in self._ends

    def append(self, name: Name, row: int) -> None:
        """Append a row that is in no queue to one."""
        extend_columns(row, self._before, self._after)
        ends = self._ends.get(name)
        if ends is None:
            self._ends[name] = [row, row]
            self._before[row] = NO_ROW
        else:
            last = ends[1]
            self._before[row], self._after[last], ends[1] = last, row, row
        self._after[row] = NO_ROW

    def remove(self, name: Name, row: int) -> None:
        """Remove a row from its queue."""
        before, after = self._before[row], self._after[row]
        ends = self._ends[name]
        if before == after == NO_ROW:
            del self._ends[name]
        if before == NO_ROW:
            ends[0] = after
        else:
            self._after[before] = after
        if after == NO_ROW:
            ends[1] = before
        else:
            self._before[after] = before

    def move_to_end(self, name: Name, rows: Sequence[int]) -> None:
        """Move rows of a queue to its end, in this order."""
        before, after, ends = self._before, self._after, self._ends[name]
        first, last = ends
        for row in rows:
            if row == last:
                continue
            previous, following = before[row], after[row]
            if previous == NO_ROW:
                first = following
            else:
                after[previous] = following
            before[following] = previous
            before[row], after[last], last = last, row, row
        after[last] = NO_ROW
        ends[:] = first, last

    def rows(self, name: Name) -> Iterator[int]:
        """Yield a queue's rows in order. Leave the queue unchanged meanwhile."""
        row = self._ends[name][0] if name in self._ends else NO_ROW
        while row != NO_ROW:
            yield row
            row = self._after[row]


def extend_columns(row: int, *columns: "array[Any]") -> None:
    """Extend columns of equal length so that they have a row; new values are 0."""
    missing = row + 1 - len(columns[0])
    if missing > 0:
        for column in columns:
            column.extend([0] * missing)
