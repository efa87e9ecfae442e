"""An eviction policy over blocks: their hashes in, their hashes out."""

from collections.abc import Iterator

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.eviction import open_policy
from halfmoon_scheduling.row_index import RowIndex


class BlockOrder:
    """The blocks of a cache, in the order in which they are to go."""

    def __init__(self, policy: str) -> None:
        """No blocks.

        Raises:
            ValueError: no such policy; the text lists those there are.
        """
        self._policy = open_policy(policy)
        self._index = RowIndex()

    def insert(self, block: BlockHash, depth: int = 0, *, tail: bool = False) -> None:
        """See `EvictionPolicy.insert`."""
        self._policy.insert(self._index.add(block), key_of(block), depth, tail=tail)

    def touch(self, block: BlockHash) -> None:
        """See `EvictionPolicy.touch`."""
        self._policy.touch(self._index.find(block))

    def remove(self, block: BlockHash) -> None:
        """See `EvictionPolicy.remove`."""
        row = self._index.find(block)
        self._policy.remove(row)
        self._index.remove(row)

    def candidates(self) -> Iterator[BlockHash]:
        """See `EvictionPolicy.candidates`."""
        return map(self._index.__getitem__, self._policy.candidates())


def key_of(block: BlockHash) -> int:
    """A number of the block's own, for policies that remember those that went."""
    return int.from_bytes(block[-8:], "little")
