"""Define an eviction policy: an order over the rows of a cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar


class EvictionPolicy(ABC):
    """Order the rows of a cache, the next one to evict first.

    A row is a small number that the cache assigns to one block at a time (see `row_index`). So a
    policy keeps its facts about rows in columns. It knows the depth of blocks in their prompts and
    their uses, never their pins: the cache skips blocks that it may not evict.
    """

    #: The name in settings, options and reports.
    name: ClassVar[str]

    @abstractmethod
    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """Add a row for a block that is stored now. Changes state.

        Args:
            row: the block's row.
            key: a number below 2^64 that identifies the block, also when it is stored again.
            depth: blocks before it in its prompt.
            tail: whether it is the last one of its prompt.
        """

    @abstractmethod
    def touch(self, row: int) -> None:
        """Record a use of a row. Changes state."""

    def touch_all(self, rows: Sequence[int]) -> None:
        """Record a use of each row, in this order. Changes state."""
        for row in rows:
            self.touch(row)

    @abstractmethod
    def remove(self, row: int) -> None:
        """Remove a row. Changes state."""

    @abstractmethod
    def candidates(self) -> Iterator[int]:
        """Yield all rows in eviction order. Leave the policy unchanged while iterating."""

    @abstractmethod
    def __len__(self) -> int: ...
