"""Memory over disk as one cache: what is written back, what is promoted, and when.

    put ──▶ memory ──(above the watermark)──▶ written back ──▶ in both ──▶ evicted: disk only
              ▲                                                  ▲              │
              └── lease: at once                                 └── promoted ◀─┘ lease: waits

`BlockCache` is the memory and `DiskMap` the disk; this file moves blocks between them. It has
no clock and does no I/O: what is to be done goes out as commands (`commands`), and how that
went comes back (`written`, `promoted`, `on_erased`).

While a block is written, the disk holds a lease on it, so it is not evicted; while one is
promoted, the disk holds a reservation, so its slot is nobody else's. Both end with the I/O and
never by time. So a slot of memory has always one owner, and everything is bounded: writes,
promotions, and those who wait for them. A disk slower than the puts makes these be refused
until it has caught up (memory is never overfull); one that fails is left out for a while, and
what must go meanwhile is dropped, as without a disk.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import (
    BlockCache,
    BlockLocation,
    CacheFull,
    DuplicateTicket,
    SlotReservation,
)
from halfmoon_scheduling.cache.pins import Pin, PinKind, PinRefused
from halfmoon_scheduling.cache.tenant_quotas import TenantQuotas
from halfmoon_scheduling.tiers.disk_map import BlockRecord, DiskBlock, DiskMap
from halfmoon_scheduling.tiers.tier_commands import (
    AnnounceBlocks,
    AnswerLease,
    Erase,
    Promote,
    Tier,
    TierCommand,
    TierOutcome,
    WriteBack,
)
from halfmoon_scheduling.tiers.tier_limits import TierCounts, TierLimits
from halfmoon_scheduling.tiers.waiting_leases import WaitingLeases

#: The owner of leases and reservations that I/O holds; no client has this name.
_DISK = ""
_FOREVER_S = float("inf")
#: Seconds that a refused put waits when a write-back is about to make room.
_SOON_S = 0.05


class TieredCache:
    """One cache of two tiers; with a disk of no slots, a memory alone."""

    def __init__(
        self,
        memory: BlockCache,
        disk: DiskMap,
        limits: TierLimits | None = None,
        tenants: TenantQuotas | None = None,
    ) -> None:
        self.memory = memory
        self.disk = disk
        self.limits = limits or TierLimits()
        #: Of blocks of either tier.
        self.pins = memory.pins
        self.tenants = tenants or TenantQuotas()
        self.counts = TierCounts()
        #: Blocks on their way to the disk, and to which slot. Stored in memory, leased by us.
        self._writing: dict[BlockHash, int] = {}
        #: Blocks on their way from the disk. On the disk, and reserved in memory by us.
        self._promoting: set[BlockHash] = set()
        #: Blocks to promote next, in order.
        self._queue: dict[BlockHash, None] = {}
        self._waiting = WaitingLeases()
        self._commands: list[TierCommand] = []
        #: Blocks that `save_all` has still to write, the next one last.
        self._to_save: list[BlockHash] = []
        #: Whether blocks are evicted until the low watermark is reached.
        self._relieving = False
        #: Failed writes since the last good one, and until when the disk is left alone.
        self._n_failures = 0
        self._off_until_s = 0.0
        self.memory.saves_first = disk.n_slots > 0

    def __contains__(self, block: BlockHash) -> bool:
        return block in self.memory or block in self.disk

    @property
    def n_writing(self) -> int:
        """Blocks on their way to the disk."""
        return len(self._writing)

    @property
    def n_promoting(self) -> int:
        """Blocks on their way from the disk, or queued for it."""
        return len(self._promoting) + len(self._queue)

    @property
    def n_room(self) -> int:
        """Blocks that fit without others being given up."""
        if not self.memory.saves_first:
            return max(0, int(self.memory.high_slots) - self.memory.n_used)
        n_both = sum(block in self.disk for block in self.memory.hashes())
        return max(0, self.disk.n_slots - len(self.disk) - (self.memory.n_used - n_both))

    @property
    def n_to_save(self) -> int:
        """Blocks that `save_all` waits for."""
        return len(self._to_save) + len(self._writing)

    @property
    def disk_is_off(self) -> bool:
        """Whether writes failed so often that the disk is left alone for now."""
        return self.disk.n_slots > 0 and not self.memory.saves_first

    def hashes(self) -> list[BlockHash]:
        """All blocks of both tiers."""
        return list(dict.fromkeys([*self.memory.hashes(), *self.disk.hashes()]))

    def parent_and_depth(self, block: BlockHash) -> tuple[BlockHash | None, int]:
        """Parent and depth (blocks before it) of a block; None and -1 when it is not here."""
        if (place := self.memory.parent_and_depth(block)) is not None:
            return place
        on_disk = self.disk.get(block)
        return (None, -1) if on_disk is None else (on_disk.record.parent, on_disk.record.depth)

    def would_make_cycle(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> bool:
        """Whether a block would come before itself in its prompt if these were put.

        Such blocks would have children for ever, and never be evicted. Only a block whose
        child is here already can close a circle, which is rare: blocks go after their children.
        """
        awaited = {h for h in hashes if h not in self and self.memory.has_children(h)}
        seen: set[BlockHash] = set()
        while awaited and parent is not None and parent not in seen:
            if parent in awaited:
                return True
            seen.add(parent)
            parent = self.memory.parent_of(parent) or self.parent_and_depth(parent)[0]
        return False

    def commands(self) -> list[TierCommand]:
        """What is to be done now, in order; each is given once."""
        given, self._commands = self._commands, []
        return given

    def restore(self, found: Iterable[DiskBlock]) -> None:
        """The disk held these when it was opened; of one found twice the last counts."""
        self.disk.restore(found)

    # -- writing -----------------------------------------------------------------------------

    def reserve(
        self,
        owner: str,
        ticket: Ticket,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        *,
        ttl_s: float | None = None,
        tenant: str = "",
        within_quota: bool = True,
    ) -> SlotReservation:
        """See `BlockCache.reserve`. Blocks on the disk count as stored.

        Blocks are a tenant's; unless they are copies, its quota holds: its own others are given
        up for them, and what still is too much gets no slots.

        Raises:
            CacheFull: not even one fits now; soon, if write-backs are under way.
            OverQuota: the tenant's blocks are all in use.
            DuplicateTicket: the owner uses this ticket already.
        """
        self._require_new(owner, ticket)
        asked = hashes
        if within_quota and self.tenants.quota(tenant) is not None:
            hashes = self._within_quota(tenant, hashes, parent, now)
        depth = None if parent is None else self._depth(parent) + 1
        try:
            reserved = self.memory.reserve(
                owner, ticket, hashes, parent, now, depth=depth, elsewhere=self.disk, ttl_s=ttl_s,
                ends_prompt=len(hashes) == len(asked),
            )  # fmt: skip
        except CacheFull as full:
            self._pump(now, n_wanted=len(hashes))
            if not self._writing:
                raise
            raise CacheFull(
                f"{full.reason}; {len(self._writing)} blocks are being written back first", _SOON_S
            ) from None
        self._gone_from_memory(reserved.evicted)
        self.tenants.writes((owner, ticket), tenant, len(reserved.places))
        self._pump(now)
        return reserved

    def commit(
        self, owner: str, ticket: Ticket, checksums: Sequence[int], now: float
    ) -> list[BlockHash]:
        """See `BlockCache.commit`."""
        stored = self.memory.commit(owner, ticket, checksums, now)
        self.tenants.written((owner, ticket), stored)
        self._pump(now)
        return stored

    def revoke(self, owner: str, ticket: Ticket) -> bool:
        """See `BlockCache.revoke`."""
        return self.memory.revoke(owner, ticket)

    def save_all(self, now: float) -> None:
        """Write to the disk what only memory has, starts of prompts first: the end is near."""
        if self.memory.saves_first:
            unsaved = [b for b in self.memory.hashes() if not self.memory.is_saved(b)]
            self._to_save = sorted(unsaved, key=self._depth, reverse=True)
        self._pump(now)

    def drop(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Give these up, children before parents; those in use, pinned or with other children
        stay."""
        for block in hashes:
            if block not in self.pins.soft:  # what a hard pin holds stays by itself
                self._discard(block)
        self._pump(now)

    # -- reading -----------------------------------------------------------------------------

    def lease(self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], now: float) -> None:
        """Lease the longest prefix of `hashes` that is in either tier: `AnswerLease` says which.

        It is decided at once when all of it is in memory; otherwise when what is on the disk
        has come, or `promotion_wait_s` is over.

        Raises:
            DuplicateTicket: the owner uses this ticket already.
        """
        self._require_new(owner, ticket)
        self.memory.expire(now)
        asked = list(dict.fromkeys(hashes))
        prefix: list[BlockHash] = []
        for block in asked:
            if block not in self:
                break
            prefix.append(block)
        for block in reversed(prefix):
            self.disk.touch(block)
        self.tenants.touch(prefix)
        missing = [block for block in prefix if block not in self.memory]
        self.counts.hits_disk += len(missing)
        self.counts.hits_memory += len(prefix) - len(missing)
        self.counts.misses += len(asked) - len(prefix)
        if missing:
            if (cut := self._enqueue(missing)) is not None:
                prefix = prefix[: prefix.index(cut)]
            for block in prefix:
                if block in self.memory:
                    self.memory.add_to_lease(owner, ticket, block, now, _FOREVER_S)
            until_s = now + self.limits.promotion_wait_s
            if not self._waiting.add((owner, ticket), prefix, missing, until_s):
                self._decide(owner, ticket, now)
        else:
            self._answer(owner, ticket, prefix, now, ())
        if len(prefix) == len(asked) and prefix:
            self._read_ahead(prefix[-1])
        self._pump(now)

    def renew(self, owner: str, ticket: Ticket, now: float) -> bool:
        """See `BlockCache.renew`; a lease that still waits is fine."""
        return (owner, ticket) in self._waiting or self.memory.renew(owner, ticket, now)

    def release(self, owner: str, ticket: Ticket, now: float) -> bool:
        """See `BlockCache.release`; one that still waits is given up, without an answer."""
        waited = self._waiting.take((owner, ticket)) is not None
        held = self.memory.release(owner, ticket)
        self._pump(now)
        return waited or held

    def forget_owner(self, owner: str) -> None:
        """See `BlockCache.forget_owner`."""
        self._waiting.forget_owner(owner)
        self.memory.forget_owner(owner)

    # -- pins --------------------------------------------------------------------------------

    def pin(self, block: BlockHash, kind: PinKind, until_s: float) -> None:
        """Pin a block of either tier, in place of an earlier pin on it.

        A hard one also holds the blocks before it, and those in memory stay there.

        Raises:
            PinRefused: it is not stored, or hard pins would hold too much.
        """
        if block not in self:
            raise PinRefused(f"block {block.hex()} is not stored here")
        self.pins.pin(block, Pin(kind, until_s), self._before(block))

    def unpin(self, block: BlockHash) -> bool:
        """Take a pin back; whether there was one."""
        return self.pins.unpin(block)

    # -- how it went -------------------------------------------------------------------------

    def written(self, block: BlockHash, outcome: TierOutcome, now: float) -> None:
        """A `WriteBack` has ended; "corrupt": what is in memory is not what was put there."""
        slot = self._writing.pop(block)
        stored, place = self.memory.get(block), self.memory.parent_and_depth(block)
        assert stored is not None and place is not None, "a block that was written has gone"
        self.memory.release(_DISK, _ticket(block))
        match outcome:
            case "ok":
                self._n_failures = 0
                self.counts.written += 1
                self.disk.store(slot, BlockRecord(block, *place, stored.checksum))
                self.memory.save(block)
            case "failed":
                self.disk.release(slot)
                self.counts.write_failures += 1
                self._n_failures += 1
                if self._n_failures >= self.limits.max_failures:
                    self._off_until_s = now + self.limits.pause_s
                    self.memory.saves_first = False
            case "corrupt":
                self.disk.release(slot)
                self.counts.corrupt += 1
                self.pins.unpin(block)
                if self.memory.give_up(block):
                    self._gone(block)
                    self._commands.append(AnnounceBlocks(tier="memory", left=(block,)))
        self._pump(now)

    def give_up(self, block: BlockHash, now: float) -> bool:
        """A block's bytes in memory are damaged: it leaves, to be had from the disk if it is there.

        False while somebody reads it.
        """
        if not self.memory.give_up(block):
            return False
        self.counts.corrupt += 1
        self._gone_from_memory([block])
        self._pump(now)
        return True

    def promoted(self, block: BlockHash, outcome: TierOutcome, now: float) -> None:
        """A `Promote` has ended; bytes that are not good are forgotten, not served."""
        self._promoting.remove(block)
        on_disk = self.disk.get(block)
        assert on_disk is not None, "a block that was promoted has gone from the disk"
        if outcome == "ok":
            self.counts.promoted += 1
            self.memory.commit(_DISK, _ticket(block), [on_disk.record.checksum], now)
            self.memory.save(block)
            self._commands.append(AnnounceBlocks(tier="disk", left=(block,)))
            self._commands.append(AnnounceBlocks(tier="memory", came=(on_disk.record,)))
            self._arrived(block, now)
        else:
            self.counts.corrupt += 1
            self._gone(block)
            self.memory.revoke(_DISK, _ticket(block))
            self._commands.append(Erase(self.disk.forget(block)))
            self._commands.append(AnnounceBlocks(tier="disk", left=(block,)))
            self._will_not_come(block, now)
        self._pump(now)

    def on_erased(self, disk_slot: int) -> None:
        """An `Erase` has ended."""
        self.disk.release(disk_slot)

    def tick(self, now: float) -> None:
        """Time passes: what ran out ends, and who waited long enough gets what there is."""
        self.memory.expire(now)
        self.pins.expire(now)
        for key in self._waiting.overdue(now):
            self._decide(*key, now)
        if self.disk_is_off and self._off_until_s <= now:
            self.memory.saves_first = True
            self._n_failures = self.limits.max_failures - 1  # one more and it is off again
        self._pump(now)

    def check(self) -> None:
        """Audit: both tiers, and what is between them."""
        self.memory.check()
        self.disk.check()
        self.pins.check()
        self.tenants.check(self.hashes())
        assert all(block in self for block in self.pins.blocks()), "a pin on what is not here"
        for block in self.memory.hashes():
            assert self.memory.is_saved(block) == (block in self.disk), "saved, but not on disk"
        assert len(self._writing) <= self.limits.max_writing
        assert all(block in self.memory and block not in self.disk for block in self._writing)
        assert len(self._promoting) <= self.limits.max_promoting
        assert len(self._queue) <= self.limits.max_queued
        assert all(block in self.disk and block not in self.memory for block in self._promoting)
        assert not self._promoting & self._queue.keys()
        for waiting in self._waiting.all():
            assert waiting.missing, "a lease waits for nothing"
            assert waiting.missing <= self._promoting | self._queue.keys()
            assert all(b in self.memory for b in waiting.prefix if b not in waiting.missing)

    # -- towards the disk --------------------------------------------------------------------

    def _pump(self, now: float, n_wanted: int = 0) -> None:
        """Start what can be started.

        Args:
            now: seconds.
            n_wanted: slots that a put found missing, whatever the watermarks say.
        """
        self._make_room(now, n_wanted)
        self._promote(now)

    def _make_room(self, now: float, n_wanted: int = 0) -> None:
        if not self.memory.saves_first:
            self._to_save.clear()
            self._gone_from_memory(self.memory.relieve(now))
            return
        while self._to_save and len(self._writing) < self.limits.max_writing:
            block = self._to_save.pop()
            is_here = block in self.memory and block not in self._writing
            if is_here and not self.memory.is_saved(block):
                self._write_back(block, now)
        used = self.memory.n_used
        if used > self.memory.high_slots:
            self._relieving = True
        elif used <= self.memory.low_slots:
            self._relieving = False
        if not (self._relieving or n_wanted) or len(self._writing) == self.limits.max_writing:
            return
        for block in self.memory.victims(max(used - int(self.memory.low_slots), n_wanted)):
            if self.memory.is_saved(block):
                if self.memory.evict(block):
                    self._gone_from_memory([block])
            elif len(self._writing) < self.limits.max_writing:
                self._write_back(block, now)

    def _write_back(self, block: BlockHash, now: float) -> None:
        slot, evicted = self.disk.allocate(self._is_spared)
        if slot is None and self.pins.n_soft:
            slot, evicted = self.disk.allocate(self._is_busy)
        if evicted is not None:
            self._gone(evicted)
            self.counts.dropped += 1
            self._commands.append(AnnounceBlocks(tier="disk", left=(evicted,)))
        stored, place = self.memory.get(block), self.memory.parent_and_depth(block)
        assert stored is not None and place is not None, "a block chosen to be written has gone"
        if slot is None:  # all that is on the disk is in use
            if self.memory.evict(block):
                self._gone_from_memory([block])
            return
        self._writing[block] = slot
        self.memory.add_to_lease(_DISK, _ticket(block), block, now, _FOREVER_S)
        record = BlockRecord(block, *place, stored.checksum)
        self._commands.append(WriteBack(record, stored.slot, slot))

    def _is_busy(self, block: BlockHash) -> bool:
        """Whether a block on the disk is in use above, on its way there, or held by a pin."""
        return (
            block in self.memory
            or block in self._promoting
            or block in self._queue
            or self.memory.has_children(block)
            or block in self.pins.held
        )

    def _is_spared(self, block: BlockHash) -> bool:
        """Whether a block is to stay on the disk as long as others can go."""
        return block in self.pins.soft or self._is_busy(block)

    def _gone_from_memory(self, blocks: Sequence[BlockHash]) -> None:
        if not blocks:
            return
        self.counts.evicted += len(blocks)
        self._commands.append(AnnounceBlocks(tier="memory", left=tuple(blocks)))
        below = tuple(found.record for block in blocks if (found := self.disk.get(block)))
        for block in blocks:
            if block not in self.disk:
                self._gone(block)
        if below:
            self._commands.append(AnnounceBlocks(tier="disk", came=below))
        self.counts.dropped += len(blocks) - len(below)

    # -- from the disk -----------------------------------------------------------------------

    def _enqueue(self, blocks: Sequence[BlockHash]) -> BlockHash | None:
        """Queue these for promotion; the first one for which there is no room, if any."""
        for block in blocks:
            if block in self._promoting or block in self._queue:
                continue
            if len(self._queue) >= self.limits.max_queued:
                return block
            self._queue[block] = None
        return None

    def _read_ahead(self, block: BlockHash) -> None:
        """Queue what came after this block the last time, unless there is much to do already."""
        following = self.disk.successor(block)
        for _ in range(self.limits.read_ahead):
            if following is None or len(self._queue) >= self.limits.max_promoting:
                return
            if following not in self.memory:
                self._enqueue([following])
            following = self.disk.successor(following)

    def _promote(self, now: float) -> None:
        while self._queue and len(self._promoting) < self.limits.max_promoting:
            block = next(iter(self._queue))
            on_disk = self.disk.get(block)
            assert on_disk is not None, "a queued block has gone from the disk"
            record = on_disk.record
            try:
                reserved = self.memory.reserve(
                    _DISK, _ticket(block), [block], record.parent, now,
                    depth=record.depth, ends_prompt=False, ttl_s=_FOREVER_S,
                )  # fmt: skip
            except CacheFull:
                if not self._writing:
                    self._make_room(now, len(self._queue))
                if self._writing or self._promoting:
                    return  # these make room, or bring what others wait for
                del self._queue[block]
                self._will_not_come(block, now)
                continue
            del self._queue[block]
            self._gone_from_memory(reserved.evicted)
            self._promoting.add(block)
            [(_, memory_slot)] = reserved.places
            self._commands.append(Promote(record, on_disk.slot, memory_slot))

    def _arrived(self, block: BlockHash, now: float) -> None:
        for key, is_complete in self._waiting.arrived(block):
            self.memory.add_to_lease(*key, block, now, _FOREVER_S)
            if is_complete:
                self._decide(*key, now)

    def _will_not_come(self, block: BlockHash, now: float) -> None:
        for key in self._waiting.on_unavailable(block):
            self._decide(*key, now)

    def _decide(self, owner: str, ticket: Ticket, now: float) -> None:
        """A waiting lease becomes one on the prefix that is in memory."""
        waiting = self._waiting.take((owner, ticket))
        assert waiting is not None, "a lease is decided that does not wait"
        self.memory.release(owner, ticket)
        self._answer(owner, ticket, waiting.prefix, now, waiting.came)

    def _answer(
        self,
        owner: str,
        ticket: Ticket,
        prefix: Sequence[BlockHash],
        now: float,
        came: Collection[BlockHash],
    ) -> None:
        places: Sequence[BlockLocation] = self.memory.lease(owner, ticket, prefix, now)
        n_from_disk = sum(place.hash in came for place in places)
        self._commands.append(AnswerLease(owner, ticket, tuple(places), n_from_disk))

    # -- what leaves ---------------------------------------------------------------------------

    def _discard(self, block: BlockHash) -> bool:
        """Give a block up in both tiers, unless it is in use, held or has children."""
        in_memory, on_disk = block in self.memory, block in self.disk
        if not (in_memory or on_disk) or self.disk.has_children(block):
            return False
        if not self.memory.evict(block) if in_memory else self._is_busy(block):
            return False
        if on_disk:
            self._commands.append(Erase(self.disk.forget(block)))
        self.counts.dropped += 1
        tier: Tier = "memory" if in_memory else "disk"
        self._commands.append(AnnounceBlocks(tier=tier, left=(block,)))
        self._gone(block)
        return True

    def _gone(self, block: BlockHash) -> None:
        """A block is in no tier any more."""
        self.pins.unpin(block)
        self.tenants.gone(block)

    def _within_quota(
        self, tenant: str, hashes: Sequence[BlockHash], parent: BlockHash | None, now: float
    ) -> Sequence[BlockHash]:
        """As many of these as a tenant may have, for which its own others are given up."""
        self.memory.expire(now)
        self.tenants.forget_writes(self.memory.has_reservation)
        self.tenants.own(tenant, [block for block in hashes if block in self])
        missing = [b for b in hashes if not (b in self or self.memory.is_reserved(b))]
        n_over = self.tenants.excess(tenant, len(missing))
        if n_over <= 0:
            return hashes
        keep = {*hashes, parent}
        n_over -= self.tenants.give_up(
            tenant, n_over, keep, self.pins.soft, self.parent_and_depth, self._discard
        )
        if n_over >= len(missing):
            raise self.tenants.refusal(tenant, self.memory.first_release_s(now))
        return hashes[: hashes.index(missing[-n_over])] if n_over else hashes

    # -- both --------------------------------------------------------------------------------

    def _depth(self, block: BlockHash) -> int:
        return self.parent_and_depth(block)[1]

    def _before(self, block: BlockHash) -> Iterator[BlockHash]:
        """The stored blocks before one in its prompt, the nearest first."""
        parent, _ = self.parent_and_depth(block)
        while parent is not None and parent in self:
            yield parent
            parent, _ = self.parent_and_depth(parent)

    def _require_new(self, owner: str, ticket: Ticket) -> None:
        if (owner, ticket) in self._waiting:
            raise DuplicateTicket(f"ticket {ticket!r} of {owner!r} is in use; choose another")


def _ticket(block: BlockHash) -> Ticket:
    return Ticket(block.hex())
