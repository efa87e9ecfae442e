"""Move blocks from the disk to memory, for leases that wait for them and ahead of such leases.

While a block is promoted, the I/O holds a reservation of its memory slot, so the slot has one
owner. Blocks are promoted in the order in which they were asked for.
"""

from collections.abc import Iterator, Sequence

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.cache.block_cache import CacheFull
from halfmoon_scheduling.tiers.tier_commands import AnnounceBlocks, Erase, Promote, TierOutcome
from halfmoon_scheduling.tiers.tier_store import DISK_OWNER, FOREVER_S, TierStore, disk_ticket
from halfmoon_scheduling.tiers.write_back import WriteBackScheduler


class BlockPromoter:
    """Queue blocks for promotion, start promotions, and follow them."""

    def __init__(self, store: TierStore, writer: WriteBackScheduler) -> None:
        """Share a store, and the scheduler that makes room in its memory."""
        self._store = store
        self._writer = writer

    @property
    def n_promoting(self) -> int:
        """Blocks being copied from the disk, or queued for it."""
        return len(self._store.promoting) + len(self._store.queued)

    def enqueue(self, blocks: Sequence[BlockHash]) -> BlockHash | None:
        """Queue blocks on the disk; return the first one that the queue has no room for, if any."""
        queued = self._store.queued
        for block in blocks:
            if block in self._store.promoting or block in queued:
                continue
            if len(queued) >= self._store.limits.max_queued:
                return block
            queued[block] = None
        return None

    def read_ahead(self, block: BlockHash) -> None:
        """Queue the blocks that followed this one the last time, while the queue is short."""
        store = self._store
        following = store.disk.successor(block)
        for _ in range(store.limits.read_ahead):
            if following is None or len(store.queued) >= store.limits.max_promoting:
                return
            if following not in store.memory:
                self.enqueue([following])
            following = store.disk.successor(following)

    def start(self, now: float) -> Iterator[BlockHash]:
        """Start queued promotions; yield each block that memory has no room for.

        The caller ends what waits for a yielded block before it continues, which may make room.
        """
        store = self._store
        while store.queued and len(store.promoting) < store.limits.max_promoting:
            block = next(iter(store.queued))
            on_disk = store.disk.get(block)
            assert on_disk is not None, "a queued block has gone from the disk"
            record = on_disk.record
            try:
                reserved = store.memory.reserve(
                    DISK_OWNER, disk_ticket(block), [block], record.parent, now,
                    depth=record.depth, ends_prompt=False, ttl_s=FOREVER_S,
                )  # fmt: skip
            except CacheFull:
                if not self._writer.n_writing:
                    self._writer.make_room(now, len(store.queued))
                if self._writer.n_writing or store.promoting:
                    return  # these make room, or bring blocks that other leases wait for
                del store.queued[block]
                yield block
                continue
            del store.queued[block]
            store.on_evicted(reserved.evicted)
            store.promoting.add(block)
            [(_, memory_slot)] = reserved.places
            store.commands.append(Promote(record, on_disk.slot, memory_slot))

    def on_promoted(self, block: BlockHash, outcome: TierOutcome, now: float) -> bool:
        """Record the end of a `Promote`; return whether the block is in memory now.

        A block whose bytes are wrong is removed from the disk and never served.
        """
        store = self._store
        store.promoting.remove(block)
        on_disk = store.disk.get(block)
        assert on_disk is not None, "a block that was promoted has gone from the disk"
        if outcome == "ok":
            store.counts.promoted += 1
            store.memory.commit(DISK_OWNER, disk_ticket(block), [on_disk.record.checksum], now)
            store.memory.mark_saved(block)
            store.commands.append(AnnounceBlocks(tier="disk", left=(block,)))
            store.commands.append(AnnounceBlocks(tier="memory", came=(on_disk.record,)))
            return True
        store.counts.corrupt += 1
        store.on_removed(block)
        store.memory.revoke(DISK_OWNER, disk_ticket(block))
        store.commands.append(Erase(store.disk.forget(block)))
        store.commands.append(AnnounceBlocks(tier="disk", left=(block,)))
        return False

    def check(self) -> None:
        """Check that blocks on their way are on the disk only, and within the limits."""
        store = self._store
        assert len(store.promoting) <= store.limits.max_promoting
        assert len(store.queued) <= store.limits.max_queued
        assert all(b in store.disk and b not in store.memory for b in store.promoting)
        assert not store.promoting & store.queued.keys()
