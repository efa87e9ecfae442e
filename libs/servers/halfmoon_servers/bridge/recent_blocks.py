"""Guess which blocks a server has cached that publishes no KV events.

The guess is what was sent there, least recently used first out, bounded by the server's cache. It
is wrong when others use the server too, and after it evicted by another order. A wrong guess costs
a prefill that takes longer than predicted.
"""

from collections import OrderedDict
from collections.abc import Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent


class RecentBlocks:
    """The blocks that a server was sent last."""

    def __init__(self, capacity: int, block_size: int) -> None:
        """Start empty; at most `capacity` blocks are kept."""
        self._capacity = capacity
        self._block_size = block_size
        #: Least recently used first. A block is used whenever its child is.
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def use(self, hashes: Sequence[BlockHash]) -> list[KvEvent]:
        """Record that a server has computed, or reused, the blocks of a prompt."""
        hashes = hashes[: self._capacity]
        new = tuple(block for block in hashes if block not in self._blocks)
        # The end of a prompt is evicted before its start, as servers do.
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        n_over = max(0, len(self._blocks) - self._capacity)
        gone = tuple(self._blocks.popitem(last=False)[0] for _ in range(n_over))
        events: list[KvEvent] = []
        if new:
            events.append(
                BlockStored(
                    block_hashes=new,
                    parent_block_hash=None,
                    token_ids=(),
                    block_size=self._block_size,
                )
            )
        if gone:
            events.append(BlockRemoved(block_hashes=gone))
        return events
