"""Which stored blocks go, and in which order: the eviction policy's, under the rules above it.

A leased block stays, and what a hard pin holds. A block goes only after its children, since
without it they could not be read. Soft-pinned ones go when nothing else can.
"""

from collections import deque
from collections.abc import Collection

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.pins import Pins
from halfmoon_scheduling.cache.stored_blocks import StoredBlocks


def choose_victims(
    stored: StoredBlocks,
    n: int,
    *,
    keep: Collection[BlockHash],
    saved_only: bool,
    pins: Pins,
) -> list[BlockHash]:
    """Up to `n` blocks to evict, children before parents; changes nothing.

    One walk in the policy's order, and one more if there are soft pins. A block passed over
    because of a child is taken as soon as its last child is: it is older than whatever comes
    later in the walk.

    Args:
        stored: the blocks.
        n: so many at the most.
        keep: blocks that must stay.
        saved_only: whether blocks that no slower tier has stay.
        pins: what is pinned.
    """
    held = pins.held
    victims: list[BlockHash] = []
    #: How many children of each block are among the victims.
    children_gone: dict[BlockHash, int] = {}
    passed: set[BlockHash] = set()
    taken: set[BlockHash] = set()
    for spared in [pins.soft, ()] if pins.n_soft else [()]:
        for candidate in stored.candidates():
            queue = deque([candidate])
            while queue and len(victims) < n:
                block = queue.popleft()
                each = stored[block]
                if each.n_leases or block in keep or (saved_only and not each.saved):
                    continue
                if block in held or block in taken:
                    continue
                if children_gone.get(block, 0) < stored.n_children(block) or block in spared:
                    passed.add(block)
                    continue
                victims.append(block)
                taken.add(block)
                if (parent := each.parent) is not None:
                    children_gone[parent] = children_gone.get(parent, 0) + 1
                    if parent in passed:
                        queue.append(parent)
            if len(victims) == n:
                return victims
    return victims
