"""What an eviction policy is: an order over the rows of a cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar


class EvictionPolicy(ABC):
    """An order over what a cache holds, the first to be evicted first.

    A row is a small number that the cache gives to one block at a time (see `row_index`), so that
    what a policy knows of it lies in columns. A policy knows where blocks stand in their prompts,
    and their use, never their sizes or pins: the cache skips what it may not evict.
    """

    #: The name in settings, options and reports.
    name: ClassVar[str]

    @abstractmethod
    def insert(self, row: int, key: int, depth: int = 0, *, tail: bool = False) -> None:
        """A block that is not here yet is stored now. Changes state.

        Args:
            row: its row.
            key: a number of the block's own, below 2^64, the same whenever it comes.
            depth: blocks before it in its prompt.
            tail: whether it is the last one of its prompt.
        """

    @abstractmethod
    def touch(self, row: int) -> None:
        """A block that is here was used. Changes state."""

    @abstractmethod
    def remove(self, row: int) -> None:
        """A block that is here is gone. Changes state."""

    @abstractmethod
    def candidates(self) -> Iterator[int]:
        """All rows in eviction order. Leave the policy unchanged while iterating."""

    @abstractmethod
    def __len__(self) -> int: ...
