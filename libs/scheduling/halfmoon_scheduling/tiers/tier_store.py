"""Hold both tiers of a kvstore, and the rules that every move between them keeps.

`BlockCache` is the memory and `DiskMap` the disk. A block may be in one of them or in both. What
moves it is elsewhere: `write_back` towards the disk, `promotion` towards memory, `quota_eviction`
and `TieredCache` out of both. They share this object and the commands that it collects.
"""

from collections.abc import Iterator, Sequence

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockCache
from halfmoon_scheduling.cache.tenant_quotas import TenantQuotas
from halfmoon_scheduling.tiers.disk_map import DiskMap
from halfmoon_scheduling.tiers.tier_commands import AnnounceBlocks, Erase, Tier, TierCommand
from halfmoon_scheduling.tiers.tier_limits import TierCounts, TierLimits

#: The owner of leases and reservations that I/O holds; no client has this name.
DISK_OWNER = ""
#: The life of leases and reservations that end with an event, never by time.
FOREVER_S = float("inf")


def disk_ticket(block: BlockHash) -> Ticket:
    """Return the ticket of the lease or reservation that I/O holds on a block."""
    return Ticket(block.hex())


class TierStore:
    """Store blocks in two tiers; with a disk of no slots, in memory alone."""

    def __init__(
        self, memory: BlockCache, disk: DiskMap, limits: TierLimits, tenants: TenantQuotas
    ) -> None:
        self.memory = memory
        self.disk = disk
        self.limits = limits
        self.tenants = tenants
        #: Pins on blocks of either tier.
        self.pins = memory.pins
        self.counts = TierCounts()
        #: Blocks being copied from the disk: on the disk, and reserved in memory for the I/O.
        #: Only `BlockPromoter` changes this and `queued`.
        self.promoting: set[BlockHash] = set()
        #: Blocks to promote next, in order. On the disk; disjoint from `promoting`.
        self.queued: dict[BlockHash, None] = {}
        #: Commands that have not been given out.
        self.commands: list[TierCommand] = []

    def __contains__(self, block: BlockHash) -> bool:
        return block in self.memory or block in self.disk

    def hashes(self) -> list[BlockHash]:
        """Return all blocks of both tiers, each once."""
        return list(dict.fromkeys([*self.memory.hashes(), *self.disk.hashes()]))

    # -- prompts -----------------------------------------------------------------------------

    def parent_and_depth(self, block: BlockHash) -> tuple[BlockHash | None, int]:
        """Return a block's parent and depth (blocks before it); None and -1 if it is not here."""
        if (place := self.memory.parent_and_depth(block)) is not None:
            return place
        on_disk = self.disk.get(block)
        return (None, -1) if on_disk is None else (on_disk.record.parent, on_disk.record.depth)

    def depth(self, block: BlockHash) -> int:
        """Return the number of blocks before a block in its prompt; -1 if it is not here."""
        return self.parent_and_depth(block)[1]

    def ancestors(self, block: BlockHash) -> Iterator[BlockHash]:
        """Yield the stored blocks before a block in its prompt, the nearest first."""
        parent, _ = self.parent_and_depth(block)
        while parent is not None and parent in self:
            yield parent
            parent, _ = self.parent_and_depth(parent)

    def would_make_cycle(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> bool:
        """Return whether a block would come before itself in its prompt if these were put.

        Such blocks would always have children, and never be evicted. Only a block whose child is
        here already can close a cycle. That is rare, because blocks go after their children.
        """
        if parent is None:
            return False
        awaited = {h for h in hashes if self.memory.has_children(h) and h not in self}
        seen: set[BlockHash] = set()
        while awaited and parent is not None and parent not in seen:
            if parent in awaited:
                return True
            seen.add(parent)
            parent = self.memory.parent_of(parent) or self.parent_and_depth(parent)[0]
        return False

    # -- blocks that leave -------------------------------------------------------------------

    def is_busy(self, block: BlockHash) -> bool:
        """Return whether a block on the disk must stay.

        It must if it is in memory too or on its way there, has children there, or is pinned hard.
        """
        return (
            block in self.memory
            or block in self.promoting
            or block in self.queued
            or self.memory.has_children(block)
            or block in self.pins.held
        )

    def discard(self, block: BlockHash) -> bool:
        """Remove a block from both tiers; return False if it is in use, pinned or has children."""
        in_memory, on_disk = block in self.memory, block in self.disk
        if not (in_memory or on_disk) or self.disk.has_children(block):
            return False
        if not self.memory.evict(block) if in_memory else self.is_busy(block):
            return False
        if on_disk:
            self.commands.append(Erase(self.disk.forget(block)))
        self.counts.dropped += 1
        tier: Tier = "memory" if in_memory else "disk"
        self.commands.append(AnnounceBlocks(tier=tier, left=(block,)))
        self.on_removed(block)
        return True

    def on_evicted(self, blocks: Sequence[BlockHash]) -> None:
        """Announce blocks that left memory: gone, or on the disk only."""
        if not blocks:
            return
        self.counts.evicted += len(blocks)
        self.commands.append(AnnounceBlocks(tier="memory", left=tuple(blocks)))
        below = tuple(found.record for block in blocks if (found := self.disk.get(block)))
        for block in blocks:
            if block not in self.disk:
                self.on_removed(block)
        if below:
            self.commands.append(AnnounceBlocks(tier="disk", came=below))
        self.counts.dropped += len(blocks) - len(below)

    def on_removed(self, block: BlockHash) -> None:
        """Drop the pin and the owner of a block that no tier holds any more."""
        self.pins.unpin(block)
        self.tenants.on_removed(block)

    def check(self) -> None:
        """Check both tiers, and that pins, owners and marks agree with them."""
        self.memory.check()
        self.disk.check()
        self.pins.check()
        self.tenants.check(self.hashes())
        assert all(block in self for block in self.pins.blocks()), "a pin on a missing block"
        for block in self.memory.hashes():
            assert self.memory.is_saved(block) == (block in self.disk), "saved, but not on disk"
