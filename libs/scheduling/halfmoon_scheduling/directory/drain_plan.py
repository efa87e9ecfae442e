"""Which blocks of a node that leaves go where: those that no other node has, starts of prompts
first, each as near as can be to the block before it.

Pure: what others hold and have room for is told, orders come out, and what became of them is
told. A target that refuses, or is lost, is left out; who asks again later looks at all anew.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import BlockHash, WorkerId


class DrainingBlock(NamedTuple):
    """A block of the node that leaves."""

    hash: BlockHash
    #: The block before it in its prompt.
    parent: BlockHash | None
    #: Blocks before it in its prompt.
    depth: int


class DrainCopy(NamedTuple):
    """Blocks for one target, each the child of the one before."""

    target: WorkerId
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None


@dataclass(slots=True)
class _Target:
    held: set[BlockHash]
    #: Blocks that fit there without others being given up.
    n_room: int


class DrainPlan:
    """One look at who has what, and the orders that follow from it."""

    def __init__(self, blocks: Iterable[DrainingBlock]) -> None:
        #: Blocks without a copy elsewhere, starts of prompts first.
        self._remaining = {
            block.hash: block for block in sorted(blocks, key=lambda block: (block.depth, block))
        }
        self._targets: dict[WorkerId, _Target] = {}
        self._children: dict[BlockHash, list[BlockHash]] = {}
        for block in self._remaining.values():
            if block.parent is not None:
                self._children.setdefault(block.parent, []).append(block.hash)

    @property
    def remaining(self) -> Collection[BlockHash]:
        """Blocks that no other node is known to have."""
        return self._remaining.keys()

    def add_target(self, target: WorkerId, hashes: Collection[BlockHash], n_room: int) -> None:
        """A node that may take blocks has these, and room for so many more."""
        self._targets[target] = _Target(set(hashes), n_room)
        for block in hashes:
            self._remaining.pop(block, None)

    def exclude(self, target: WorkerId) -> None:
        """A node takes no more, or is gone; what is there stays known."""
        self._targets[target].n_room = 0

    def next(self, max_blocks: int) -> DrainCopy | None:
        """The next blocks to copy; None when nothing is left, or nobody has room."""
        with_room = {name: each for name, each in self._targets.items() if each.n_room > 0}
        if not self._remaining or not with_room:
            return None
        first = next(iter(self._remaining.values()))
        name, target = min(
            with_room.items(), key=lambda each: (first.parent not in each[1].held, -each[1].n_room)
        )
        chain = [first.hash]
        while len(chain) < min(max_blocks, target.n_room):
            following = next(
                (c for c in self._children.get(chain[-1], ()) if c in self._remaining), None
            )
            if following is None:
                break
            chain.append(following)
        return DrainCopy(name, tuple(chain), first.parent)

    def on_copied(self, order: DrainCopy, n_blocks: int) -> None:
        """The first so many blocks of an order are at its target now."""
        target = self._targets[order.target]
        for block in order.hashes[:n_blocks]:
            target.held.add(block)
            target.n_room -= self._remaining.pop(block, None) is not None
        if n_blocks < len(order.hashes):
            target.n_room = 0  # for now: it has less room than it said, or could not read all
