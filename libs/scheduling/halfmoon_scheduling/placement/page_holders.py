"""Remember which decode worker may still have the KV of a prompt in its pages.

A later prompt of a conversation contains the prompts before it, and block hashes are chained. So
the hash of a prompt's last full block is enough to find the worker that decoded it. Whether the
worker still has the pages is known to it alone: this breaks ties, and promises nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence

from halfmoon_protocol.ids import BlockHash, WorkerId

#: Prompts that are remembered at the most; the oldest ones are forgotten first.
MAX_PROMPTS = 65_536


class PageHolders:
    """The decode workers of recent prompts."""

    def __init__(self) -> None:
        """Remember nothing."""
        #: Worker and generation, by the hash of a prompt's last full block.
        self._holders: OrderedDict[BlockHash, tuple[WorkerId, int]] = OrderedDict()

    def put(self, block_hashes: Sequence[BlockHash], worker_id: WorkerId, generation: int) -> None:
        """Remember the decode worker of a prompt that has landed there."""
        if not block_hashes:
            return
        self._holders[block_hashes[-1]] = worker_id, generation
        self._holders.move_to_end(block_hashes[-1])
        if len(self._holders) > MAX_PROMPTS:
            self._holders.popitem(last=False)

    def find(self, block_hashes: Sequence[BlockHash]) -> tuple[WorkerId, int] | None:
        """Return worker and generation of the longest known beginning of a prompt."""
        if not self._holders:
            return None
        last = next(filter(self._holders.__contains__, reversed(block_hashes)), None)
        return None if last is None else self._holders[last]
