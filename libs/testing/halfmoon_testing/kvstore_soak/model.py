"""Model which blocks each kvstore node owes, to compare live nodes with.

A node owes a block from the moment when it confirmed that the block is served. The debt ends when
the node is killed, when its disk refuses writes, or when the block is damaged or dropped. A node
must serve the blocks that it owes. It may serve others, with the right bytes. This module has no
I/O and no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash


@dataclass
class _NodeState:
    """Blocks of one node, and its state."""

    owed: set[BlockHash] = field(default_factory=set)
    #: Blocks whose bytes were overwritten; reads of them may fail.
    damaged: set[BlockHash] = field(default_factory=set)
    #: The damaged blocks that were overwritten in memory, where readers read.
    visible: set[BlockHash] = field(default_factory=set)
    #: Blocks that the node announced to be on its disk, or that were found there.
    saved: set[BlockHash] = field(default_factory=set)
    #: Blocks that it must have after a restart: it owed them when killed, and had them on disk.
    must_return: set[BlockHash] = field(default_factory=set)
    #: Number of the node's present epoch; answers to requests of an earlier epoch prove nothing.
    epoch: int = 0
    #: Number of kills; announcements of an earlier process prove nothing.
    n_kills: int = 0
    #: Whether it owes blocks at all: not while it is dead, or its disk refuses writes.
    is_good: bool = True


class KvstoreModel:
    """Record which node owes which blocks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._nodes = {name: _NodeState() for name in names}

    def epoch(self, name: str) -> int:
        """Return the epoch, to be read before a request and passed back with its answer."""
        return self._nodes[name].epoch

    def n_kills(self, name: str) -> int:
        """Return the number of kills, to be read before events and passed back with them."""
        return self._nodes[name].n_kills

    def holders(self, block: BlockHash) -> list[str]:
        """Return the nodes that owe a block."""
        return [name for name, node in self._nodes.items() if block in node.owed]

    def owed(self, name: str) -> frozenset[BlockHash]:
        """Return the blocks that a node owes."""
        return frozenset(self._nodes[name].owed)

    def owes_prefix(self, name: str, hashes: Sequence[BlockHash]) -> int:
        """Return the length of the longest prefix that a node owes."""
        owed = self._nodes[name].owed
        return next((i for i, block in enumerate(hashes) if block not in owed), len(hashes))

    def is_good(self, name: str) -> bool:
        """Return whether a node owes blocks at all now."""
        return self._nodes[name].is_good

    def may_be_damaged(self, name: str, block: BlockHash) -> bool:
        """Return whether a reader may find this block damaged: it was overwritten in memory.

        Damage on the disk must be noticed by the node itself.
        """
        return block in self._nodes[name].visible

    # -- what happens ------------------------------------------------------------------------

    def on_stored(self, name: str, blocks: Iterable[BlockHash], epoch: int) -> None:
        """Record that a node serves these blocks, by its answer to a request of that epoch."""
        node = self._nodes[name]
        if node.is_good and node.epoch == epoch:
            node.owed |= {block for block in blocks if block not in node.damaged}

    def on_saved(self, name: str, blocks: Iterable[BlockHash], n_kills: int) -> None:
        """Record that a node, after so many kills, announced these blocks on its disk."""
        node = self._nodes[name]
        if node.n_kills == n_kills:
            node.saved |= {*blocks}

    def on_erased(self, name: str, blocks: Iterable[BlockHash], n_kills: int) -> None:
        """Record that a node, after so many kills, announced these blocks as gone from its disk."""
        node = self._nodes[name]
        if node.n_kills == n_kills:
            node.saved -= {*blocks}

    def must_return(self, name: str) -> frozenset[BlockHash]:
        """Return the blocks that a killed node must have after its restart."""
        return frozenset(self._nodes[name].must_return)

    def on_dropped(self, name: str, blocks: Iterable[BlockHash]) -> None:
        """Record that blocks of a node are dropped on purpose, or damaged on its disk."""
        node = self._nodes[name]
        node.owed -= {*blocks}
        node.saved -= {*blocks}
        node.must_return -= {*blocks}

    def on_damaged(self, name: str, blocks: Iterable[BlockHash], *, in_memory: bool) -> None:
        """Record that the bytes of blocks are being overwritten: the node may have them or not."""
        self.on_dropped(name, blocks)
        self._nodes[name].damaged |= {*blocks}
        if in_memory:
            self._nodes[name].visible |= {*blocks}

    def on_mended(self, name: str, blocks: Iterable[BlockHash]) -> None:
        """Record that blocks of a node are no longer damaged; the node may have them or not."""
        self._nodes[name].damaged -= {*blocks}
        self._nodes[name].visible -= {*blocks}

    def on_down(self, name: str, *, killed: bool) -> None:
        """Record a kill, or a disk that refuses writes: the node owes nothing until `on_up`."""
        node = self._nodes[name]
        node.is_good = False
        node.n_kills += killed
        node.must_return = node.owed & node.saved if killed else set()
        if killed:
            node.saved.clear()
            node.damaged.clear()  # in memory, which is gone
            node.visible.clear()
        node.epoch += 1
        node.owed.clear()

    def on_up(self, name: str, found: Iterable[BlockHash], saved: Iterable[BlockHash] = ()) -> None:
        """Record that a node is healthy again and has these blocks, some of them on its disk."""
        node = self._nodes[name]
        node.is_good = True
        node.epoch += 1
        node.must_return.clear()
        node.saved |= {*saved}
        node.owed = {*found} - node.damaged
