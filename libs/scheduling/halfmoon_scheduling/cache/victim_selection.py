"""Choose the stored blocks to evict, in the policy's order and under the rules above it.

Leased blocks stay, and so do blocks that a hard pin holds. A block is evicted only after its
children, since they could not be read without it. Soft-pinned blocks go when no others can.
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
    """Return up to `n` blocks to evict, children before parents; change nothing.

    Walk once in the policy's order, and once more if there are soft pins. A block that was passed
    over because of a child is chosen right after its last child: it is older than all blocks that
    come later in the walk.

    Args:
        stored: the blocks.
        n: blocks to choose at the most.
        keep: blocks that must stay.
        saved_only: whether blocks must stay that no slower tier has.
        pins: the pins on blocks.
    """
    held = pins.held
    victims: list[BlockHash] = []
    #: Children of each block that are among the victims.
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
