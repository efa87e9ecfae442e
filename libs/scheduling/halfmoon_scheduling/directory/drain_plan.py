"""Plan where the blocks of a draining node go.

Only blocks that no other node has are copied, the starts of prompts first. Each goes to a node
that holds the block before it, if possible. The caller says what other nodes hold and have room
for, makes the planned copies, and reports their results. A target that refuses, or is lost, is left
out of this plan; a later plan starts anew.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon_protocol.ids import BlockHash, WorkerId


class DrainingBlock(NamedTuple):
    """A block of the draining node."""

    hash: BlockHash
    #: The block before it in its prompt.
    parent: BlockHash | None
    #: Blocks before it in its prompt.
    depth: int


class DrainCopy(NamedTuple):
    """Blocks to copy to one target, each the child of the one before."""

    target: WorkerId
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None


@dataclass(slots=True)
class _Target:
    held: set[BlockHash]
    #: Blocks that fit there without evictions.
    n_room: int


class DrainPlan:
    """Plan copies from one state of all nodes."""

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
        """Add a node that may take blocks, with the blocks that it has and its room."""
        self._targets[target] = _Target(set(hashes), n_room)
        for block in hashes:
            self._remaining.pop(block, None)

    def exclude(self, target: WorkerId) -> None:
        """Exclude a node that is full or gone; blocks known to be there need no copy."""
        self._targets[target].n_room = 0

    def next(self, max_blocks: int) -> DrainCopy | None:
        """Return the next blocks to copy; None when none remain, or no node has room."""
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

    def on_copied(self, copy: DrainCopy, n_blocks: int) -> None:
        """Record that the first `n_blocks` of a copy have arrived at its target."""
        target = self._targets[copy.target]
        for block in copy.hashes[:n_blocks]:
            target.held.add(block)
            target.n_room -= self._remaining.pop(block, None) is not None
        if n_blocks < len(copy.hashes):
            target.n_room = 0  # for now: it has less room than it said, or could not read all
