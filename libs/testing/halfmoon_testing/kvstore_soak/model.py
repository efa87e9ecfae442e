"""What a pool of kvstores owes its users: the model that a soak compares live nodes with.

A node owes a block from the moment it said that the block is served, until something happened
that may take blocks from it: it was killed (what only memory had is gone), its disk refused
writes, the block was damaged or dropped on purpose. What it owes it must serve; what it does
not owe it may serve, with the right bytes. No I/O here, and no time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from halfmoon_protocol.ids import BlockHash


@dataclass
class _Account:
    """One node's."""

    owed: set[BlockHash] = field(default_factory=set)
    #: Whose bytes were overwritten: a reader may not find them.
    damaged: set[BlockHash] = field(default_factory=set)
    #: Those of them that were overwritten in memory, where readers read.
    visible: set[BlockHash] = field(default_factory=set)
    #: What the node said to be on its disk, or was found there.
    saved: set[BlockHash] = field(default_factory=set)
    #: What it must have when it is back: it owed it when it was killed, and had it on its disk.
    must_return: set[BlockHash] = field(default_factory=set)
    #: Which stretch of its life this is; what was asked in an earlier one proves nothing.
    stretch: int = 0
    #: How often it was killed; what an earlier process announced proves nothing.
    n_kills: int = 0
    #: Whether it promises anything now: not while it is dead, or its disk refuses writes.
    is_good: bool = True


class KvstoreModel:
    """Which node owes which blocks."""

    def __init__(self, names: Sequence[str]) -> None:
        self._accounts = {name: _Account() for name in names}

    def epoch(self, name: str) -> int:
        """To be noted before a question is asked, and given back with its answer."""
        return self._accounts[name].stretch

    def n_kills(self, name: str) -> int:
        """To be noted before a node's events are listened to, and given back with them."""
        return self._accounts[name].n_kills

    def holders(self, block: BlockHash) -> list[str]:
        """Nodes that owe a block."""
        return [name for name, account in self._accounts.items() if block in account.owed]

    def owed(self, name: str) -> frozenset[BlockHash]:
        """What a node owes."""
        return frozenset(self._accounts[name].owed)

    def owes_prefix(self, name: str, hashes: Sequence[BlockHash]) -> int:
        """Of how many of these, from the first, a node owes all."""
        owed = self._accounts[name].owed
        return next((i for i, block in enumerate(hashes) if block not in owed), len(hashes))

    def is_good(self, name: str) -> bool:
        """Whether a node promises anything now."""
        return self._accounts[name].is_good

    def may_be_damaged(self, name: str, block: BlockHash) -> bool:
        """Whether a reader may find this block damaged: it was overwritten in memory.

        What was overwritten on the disk the node itself must notice.
        """
        return block in self._accounts[name].visible

    # -- what happens ------------------------------------------------------------------------

    def on_stored(self, name: str, blocks: Iterable[BlockHash], stretch: int) -> None:
        """A node said, to a question of that stretch, that it serves these."""
        account = self._accounts[name]
        if account.is_good and account.stretch == stretch:
            account.owed |= {block for block in blocks if block not in account.damaged}

    def on_saved(self, name: str, blocks: Iterable[BlockHash], n_kills: int) -> None:
        """A node announced, in that life of its, that these are on its disk."""
        account = self._accounts[name]
        if account.n_kills == n_kills:
            account.saved |= {*blocks}

    def on_erased(self, name: str, blocks: Iterable[BlockHash], n_kills: int) -> None:
        """A node announced, in that life of its, that these are not on its disk any more."""
        account = self._accounts[name]
        if account.n_kills == n_kills:
            account.saved -= {*blocks}

    def must_return(self, name: str) -> frozenset[BlockHash]:
        """What a node that was killed must have when it is back."""
        return frozenset(self._accounts[name].must_return)

    def on_dropped(self, name: str, blocks: Iterable[BlockHash]) -> None:
        """These are dropped at a node on purpose, or damaged on its disk."""
        account = self._accounts[name]
        account.owed -= {*blocks}
        account.saved -= {*blocks}
        account.must_return -= {*blocks}

    def on_damaged(self, name: str, blocks: Iterable[BlockHash], *, in_memory: bool) -> None:
        """The bytes of these at a node are being overwritten: it may have them or not."""
        self.on_dropped(name, blocks)
        self._accounts[name].damaged |= {*blocks}
        if in_memory:
            self._accounts[name].visible |= {*blocks}

    def on_mended(self, name: str, blocks: Iterable[BlockHash]) -> None:
        """No bytes of these are damaged there any more; whether it has them is open."""
        self._accounts[name].damaged -= {*blocks}
        self._accounts[name].visible -= {*blocks}

    def on_down(self, name: str, *, killed: bool) -> None:
        """A node is killed, or its disk refuses writes: it promises nothing until `up`."""
        account = self._accounts[name]
        account.is_good = False
        account.n_kills += killed
        account.must_return = account.owed & account.saved if killed else set()
        if killed:
            account.saved.clear()
            account.damaged.clear()  # in memory, which is gone
            account.visible.clear()
        account.stretch += 1
        account.owed.clear()

    def on_up(self, name: str, found: Iterable[BlockHash], saved: Iterable[BlockHash] = ()) -> None:
        """It is well again and has these, some of them known to be on its disk."""
        account = self._accounts[name]
        account.is_good = True
        account.stretch += 1
        account.must_return.clear()
        account.saved |= {*saved}
        account.owed = {*found} - account.damaged
