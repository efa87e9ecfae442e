"""Which slot of a disk holds which block: a kvstore's slower tier, as numbers.

The bytes are the service's. A slot is in exactly one of three states:

    free ──allocate──▶ held (being written) ──store──▶ stored ──allocate (evicts)──▶ held
      ▲                    │                              │
      └──────release───────┘◀───────────forget────────────┘

As in memory, a block goes only after its children, be they here or above.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.eviction import EvictionPolicy, open_policy


class BlockRecord(msgspec.Struct, frozen=True):
    """What a disk knows of a block: enough to serve it again after a restart."""

    hash: BlockHash
    #: The block before it in its prompt.
    parent: BlockHash | None
    #: Blocks before it in its prompt.
    depth: int
    #: xxh3-64 of its bytes.
    checksum: int


class OnDisk(msgspec.Struct, frozen=True):
    """A block that is on the disk, and where."""

    record: BlockRecord
    slot: int


@dataclass(slots=True)
class _Children:
    """Those of one block that are on the disk."""

    n: int
    #: The one that came last; perhaps gone since.
    last: BlockHash


class DiskMap:
    """Equal slots of one block each."""

    def __init__(self, n_slots: int, *, policy: str = "lru") -> None:
        """An empty disk.

        Raises:
            ValueError: an unknown policy.
        """
        self.n_slots = n_slots
        #: Slots of no block, the next one to use first.
        self._free: deque[int] = deque(range(n_slots))
        #: Slots that are written to, or erased. Disjoint from `_free` and from stored blocks'.
        self._held: set[int] = set()
        self._stored: dict[BlockHash, OnDisk] = {}
        #: Blocks with children here, whether or not they are here themselves.
        self._children: dict[BlockHash, _Children] = {}
        #: Orders exactly the keys of `_stored`.
        self._policy: EvictionPolicy[BlockHash] = open_policy(policy)

    def __len__(self) -> int:
        """Blocks on the disk."""
        return len(self._stored)

    def __contains__(self, block: object) -> bool:
        return block in self._stored

    def get(self, block: BlockHash) -> OnDisk | None:
        """A block, if it is here."""
        return self._stored.get(block)

    def hashes(self) -> list[BlockHash]:
        """All blocks."""
        return list(self._stored)

    def has_children(self, block: BlockHash) -> bool:
        """Whether a child of this block is here, be the block here or not."""
        return block in self._children

    def successor(self, block: BlockHash) -> BlockHash | None:
        """The child of this block that came here last, if it still is here."""
        children = self._children.get(block)
        return children.last if children is not None and children.last in self._stored else None

    def touch(self, block: BlockHash) -> None:
        """A block was asked for; not being here is fine."""
        if block in self._stored:
            self._policy.touch(block)

    def allocate(self, busy: Callable[[BlockHash], bool]) -> tuple[int | None, BlockHash | None]:
        """Take a slot to write to.

        Args:
            busy: which blocks must stay.

        Returns:
            The slot, None if there is none; and the block that went for it, if one did.
        """
        if self._free:
            slot = self._free.popleft()
            self._held.add(slot)
            return slot, None
        for block in self._policy.candidates():
            if block not in self._children and not busy(block):
                return self.forget(block), block
        return None, None

    def store(self, slot: int, record: BlockRecord) -> None:
        """A held slot holds this block now, which is nowhere else on the disk."""
        self._held.remove(slot)
        self._keep(slot, record)

    def restore(self, found: OnDisk) -> bool:
        """A block was found in a free slot after a restart; False if it is known already."""
        if found.record.hash in self._stored:
            return False
        self._free.remove(found.slot)
        self._keep(found.slot, found.record)
        return True

    def release(self, slot: int) -> None:
        """A held slot holds nothing; it is the last to be used again."""
        self._held.remove(slot)
        self._free.append(slot)

    def forget(self, block: BlockHash) -> int:
        """A block is not on the disk any more; its slot, which is held."""
        gone = self._stored.pop(block)
        self._policy.remove(block)
        self._held.add(gone.slot)
        if (parent := gone.record.parent) is not None:
            children = self._children[parent]
            children.n -= 1
            if not children.n:
                del self._children[parent]
        return gone.slot

    def check(self) -> None:
        """Audit: every slot in one state, every count what it counts."""
        slots = [*self._free, *self._held, *(found.slot for found in self._stored.values())]
        assert sorted(slots) == list(range(self.n_slots)), "a slot is lost or held twice"
        assert sorted(self._policy.candidates()) == sorted(self._stored), "policy differs"
        counts: dict[BlockHash, int] = {}
        for found in self._stored.values():
            if found.record.parent is not None:
                counts[found.record.parent] = counts.get(found.record.parent, 0) + 1
        assert counts == {block: children.n for block, children in self._children.items()}

    def _keep(self, slot: int, record: BlockRecord) -> None:
        self._stored[record.hash] = OnDisk(record, slot)
        self._policy.insert(record.hash, record.depth)
        if record.parent is not None:
            children = self._children.setdefault(record.parent, _Children(0, record.hash))
            children.n += 1
            children.last = record.hash
