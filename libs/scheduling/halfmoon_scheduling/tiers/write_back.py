"""Move blocks towards the disk: write back what only memory has, and evict what the disk has too.

Memory is kept between two watermarks. Above the high one, blocks that the disk does not have are
written back and the others evicted, until the low one is reached. While a block is written, the
I/O holds a lease on it, so it is not evicted. A disk whose writes fail is paused for a while, and
blocks that must go meanwhile are dropped, as without a disk.
"""

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_scheduling.tiers.tier_commands import AnnounceBlocks, TierOutcome, WriteBack
from halfmoon_scheduling.tiers.tier_store import DISK_OWNER, FOREVER_S, TierStore, disk_ticket


class WriteBackScheduler:
    """Choose the blocks to write back and to evict, and follow the writes."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        #: Disk slots of the blocks being written. They are in memory and leased by the I/O.
        self._writing: dict[BlockHash, int] = {}
        #: Blocks that `save_all` has still to write, the next one last.
        self._to_save: list[BlockHash] = []
        #: Whether blocks are evicted until the low watermark is reached.
        self._is_evicting = False
        #: Failed writes since the last good one, and the end of the disk's pause.
        self._n_failures = 0
        self._paused_until_s = 0.0
        self.use_disk()

    def use_disk(self) -> None:
        """Write blocks to the disk before they leave memory, if it has room for any."""
        self._store.memory.saves_first = self._store.disk.n_slots > 0

    @property
    def n_writing(self) -> int:
        """Blocks being written to the disk."""
        return len(self._writing)

    @property
    def n_to_save(self) -> int:
        """Blocks that `save_all` waits for."""
        return len(self._to_save) + len(self._writing)

    @property
    def is_paused(self) -> bool:
        """True while the disk is paused because writes failed."""
        return self._store.disk.n_slots > 0 and not self._store.memory.saves_first

    def save_all(self) -> None:
        """Plan to write what only memory has, the starts of prompts first."""
        memory = self._store.memory
        if memory.saves_first:
            unsaved = [block for block in memory.hashes() if not memory.is_saved(block)]
            self._to_save = sorted(unsaved, key=self._store.depth, reverse=True)

    def make_room(self, now: float, n_wanted: int = 0) -> None:
        """Start writes and evict blocks, as far as watermarks and limits say.

        Args:
            now: seconds.
            n_wanted: slots that a put or a promotion lacks, whatever the watermarks say.
        """
        memory, limits = self._store.memory, self._store.limits
        if not memory.saves_first:
            self._to_save.clear()
            self._store.on_evicted(memory.evict_to_watermark(now))
            return
        while self._to_save and len(self._writing) < limits.max_writing:
            block = self._to_save.pop()
            is_here = block in memory and block not in self._writing
            if is_here and not memory.is_saved(block):
                self._write_back(block, now)
        used = memory.n_used
        if used > memory.high_slots:
            self._is_evicting = True
        elif used <= memory.low_slots:
            self._is_evicting = False
        if not (self._is_evicting or n_wanted) or len(self._writing) == limits.max_writing:
            return
        for block in memory.victims(max(used - int(memory.low_slots), n_wanted)):
            if memory.is_saved(block):
                self._evict(block)
            elif len(self._writing) < limits.max_writing:
                self._write_back(block, now)

    def on_written(self, block: BlockHash, outcome: TierOutcome, now: float) -> None:
        """Record the end of a `WriteBack`; "corrupt": memory does not hold the bytes that were put.

        A corrupt block is discarded. After several failures in a row the disk is paused.
        """
        store = self._store
        slot = self._writing.pop(block)
        stored, place = store.memory.get(block), store.memory.parent_and_depth(block)
        assert stored is not None and place is not None, "a block that was written has gone"
        store.memory.release(DISK_OWNER, disk_ticket(block))
        match outcome:
            case "ok":
                self._n_failures = 0
                store.counts.written += 1
                store.disk.store(slot, BlockRecord(block, *place, stored.checksum))
                store.memory.mark_saved(block)
            case "failed":
                store.disk.release(slot)
                store.counts.write_failures += 1
                self._n_failures += 1
                if self._n_failures >= store.limits.max_failures:
                    self._paused_until_s = now + store.limits.pause_s
                    store.memory.saves_first = False
            case "corrupt":
                store.disk.release(slot)
                store.counts.corrupt += 1
                store.pins.unpin(block)
                if store.memory.discard_damaged(block):
                    store.on_removed(block)
                    store.commands.append(AnnounceBlocks(tier="memory", left=(block,)))

    def on_tick(self, now: float) -> None:
        """End the disk's pause once it is over; the next failed write pauses it again."""
        if self.is_paused and self._paused_until_s <= now:
            self._store.memory.saves_first = True
            self._n_failures = self._store.limits.max_failures - 1

    def check(self) -> None:
        """Check that blocks being written are in memory only, and within the limit."""
        store = self._store
        assert len(self._writing) <= store.limits.max_writing
        assert all(b in store.memory and b not in store.disk for b in self._writing)

    def _write_back(self, block: BlockHash, now: float) -> None:
        """Write a block to a disk slot; evict the block if all disk slots are in use."""
        store = self._store
        slot, evicted = store.disk.allocate(self._is_spared)
        if slot is None and store.pins.n_soft:
            slot, evicted = store.disk.allocate(store.is_busy)
        if evicted is not None:
            store.on_removed(evicted)
            store.counts.dropped += 1
            store.commands.append(AnnounceBlocks(tier="disk", left=(evicted,)))
        stored, place = store.memory.get(block), store.memory.parent_and_depth(block)
        assert stored is not None and place is not None, "a block chosen to be written has gone"
        if slot is None:
            self._evict(block)
            return
        self._writing[block] = slot
        store.memory.add_to_lease(DISK_OWNER, disk_ticket(block), block, now, FOREVER_S)
        record = BlockRecord(block, *place, stored.checksum)
        store.commands.append(WriteBack(record, stored.slot, slot))

    def _evict(self, block: BlockHash) -> None:
        if self._store.memory.evict(block):
            self._store.on_evicted([block])

    def _is_spared(self, block: BlockHash) -> bool:
        """Return whether a block stays on the disk as long as others can go."""
        return block in self._store.pins.soft or self._store.is_busy(block)
