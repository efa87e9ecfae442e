"""Present memory over disk as one cache: put, lease and pin blocks of either tier.

    put ──▶ memory ──(above the watermark)──▶ written back ──▶ in both ──▶ evicted: disk only
              ▲                                                  ▲              │
              └── lease: at once                                 └── promoted ◀─┘ lease: waits

The parts call in one direction:

    TieredCache ─▶ TierLeases ─▶ BlockPromoter ─▶ WriteBackScheduler ─▶ TierStore
         └───────▶ quota_eviction ─────────────────────────────────────────▲

Nothing here has a clock or does I/O. What is to be done goes out as commands (`commands`), and
its outcome comes back (`on_written`, `on_promoted`, `on_erased`).

While a block is written or promoted, the I/O holds a lease or a reservation on its memory slot.
Both end with the I/O and never by time. So a slot of memory always has one owner, and everything
is bounded: writes, promotions, and leases that wait for them. When puts are faster than the disk,
they are refused until it has caught up; memory is never overfull.
"""

from collections.abc import Iterable, Sequence

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull, SlotReservation
from halfmoon_scheduling.cache.pins import Pin, PinKind, PinRefused
from halfmoon_scheduling.cache.tenant_quotas import TenantQuotas
from halfmoon_scheduling.tiers.disk_map import DiskBlock, DiskMap
from halfmoon_scheduling.tiers.promotion import BlockPromoter
from halfmoon_scheduling.tiers.quota_eviction import fit_into_quota
from halfmoon_scheduling.tiers.tier_commands import TierCommand, TierOutcome
from halfmoon_scheduling.tiers.tier_leases import TierLeases
from halfmoon_scheduling.tiers.tier_limits import TierLimits
from halfmoon_scheduling.tiers.tier_store import TierStore
from halfmoon_scheduling.tiers.write_back import WriteBackScheduler

#: Seconds that a refused put waits when a write-back is about to make room.
_SOON_S = 0.05


class TieredCache:
    """Put, lease and pin blocks of two tiers; with a disk of no slots, of memory alone."""

    def __init__(
        self,
        memory: BlockCache,
        disk: DiskMap,
        limits: TierLimits | None = None,
        tenants: TenantQuotas | None = None,
    ) -> None:
        store = TierStore(memory, disk, limits or TierLimits(), tenants or TenantQuotas())
        self._store = store
        self.memory, self.disk = memory, disk
        self.limits, self.tenants = store.limits, store.tenants
        self.pins, self.counts = store.pins, store.counts
        self._writer = WriteBackScheduler(store)
        self._promoter = BlockPromoter(store, self._writer)
        self._leases = TierLeases(store, self._promoter)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._store

    @property
    def n_writing(self) -> int:
        """Blocks being written to the disk."""
        return self._writer.n_writing

    @property
    def n_promoting(self) -> int:
        """Blocks being copied from the disk, or queued for it."""
        return self._promoter.n_promoting

    @property
    def n_room(self) -> int:
        """Blocks that fit without evicting others from both tiers."""
        if not self.memory.saves_first:
            return max(0, int(self.memory.high_slots) - self.memory.n_used)
        n_both = sum(block in self.disk for block in self.memory.hashes())
        return max(0, self.disk.n_slots - len(self.disk) - (self.memory.n_used - n_both))

    @property
    def n_to_save(self) -> int:
        """Blocks that `save_all` waits for."""
        return self._writer.n_to_save

    @property
    def disk_is_off(self) -> bool:
        """True while the disk is paused because writes failed."""
        return self._writer.is_paused

    def hashes(self) -> list[BlockHash]:
        """Return all blocks of both tiers, each once."""
        return self._store.hashes()

    def parent_and_depth(self, block: BlockHash) -> tuple[BlockHash | None, int]:
        """Return a block's parent and depth (blocks before it); None and -1 if it is not here."""
        return self._store.parent_and_depth(block)

    def would_make_cycle(self, hashes: Sequence[BlockHash], parent: BlockHash | None) -> bool:
        """Return whether a block would come before itself in its prompt if these were put."""
        return self._store.would_make_cycle(hashes, parent)

    def commands(self) -> list[TierCommand]:
        """Return the commands since the last call, in order; each is given once."""
        given, self._store.commands = self._store.commands, []
        return given

    def restore(self, found: Iterable[DiskBlock]) -> None:
        """Take over what the disk held when it was opened; of one found twice the last counts."""
        self.disk.restore(found)

    def grow_disk(self, n_slots: int) -> None:
        """Use so many slots more, which the disk has gained behind its present ones."""
        is_first = self.disk.n_slots == 0
        self.disk.grow(n_slots)
        if is_first:
            self._writer.use_disk()

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
        """Reserve memory slots for a put; see `BlockCache.reserve`. Blocks on disk count as stored.

        A tenant's quota holds, unless the blocks are copies: its own older blocks are discarded
        for them, and blocks that are still too many get no slots.

        Raises:
            CacheFull: not even one fits now; soon, if write-backs are under way.
            OverQuota: the tenant's blocks are all in use.
            DuplicateTicket: the owner uses this ticket already.
        """
        self._leases.require_new(owner, ticket)
        asked = hashes
        if within_quota and self.tenants.quota(tenant) is not None:
            hashes = fit_into_quota(self._store, tenant, hashes, parent, now)
        depth = None if parent is None else self._store.depth(parent) + 1
        try:
            reserved = self.memory.reserve(
                owner, ticket, hashes, parent, now, depth=depth, elsewhere=self.disk, ttl_s=ttl_s,
                ends_prompt=len(hashes) == len(asked),
            )  # fmt: skip
        except CacheFull as full:
            self._advance(now, n_wanted=len(hashes))
            if not self.n_writing:
                raise
            raise CacheFull(
                f"{full.reason}; {self.n_writing} blocks are being written back first", _SOON_S
            ) from None
        self._store.on_evicted(reserved.evicted)
        self.tenants.writes((owner, ticket), tenant, len(reserved.places))
        self._advance(now)
        return reserved

    def commit(
        self, owner: str, ticket: Ticket, checksums: Sequence[int], now: float
    ) -> list[BlockHash]:
        """Store the blocks of a reservation; see `BlockCache.commit`."""
        stored = self.memory.commit(owner, ticket, checksums, now)
        self.tenants.written((owner, ticket), stored)
        self._advance(now)
        return stored

    def revoke(self, owner: str, ticket: Ticket) -> bool:
        """Cancel a reservation; see `BlockCache.revoke`."""
        return self.memory.revoke(owner, ticket)

    def save_all(self, now: float) -> None:
        """Write what only memory has to the disk, because the node is about to stop."""
        self._writer.save_all()
        self._advance(now)

    def drop(self, hashes: Sequence[BlockHash], now: float) -> None:
        """Discard blocks, children before parents; keep those in use, pinned or with children."""
        for block in hashes:
            if block not in self.pins.soft:  # what a hard pin holds stays by itself
                self._store.discard(block)
        self._advance(now)

    # -- reading -----------------------------------------------------------------------------

    def lease(self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], now: float) -> None:
        """Lease the longest prefix of `hashes` that is in either tier; `AnswerLease` tells it.

        The answer comes at once when all of the prefix is in memory. Else it comes when the
        blocks on the disk have been promoted, or after `promotion_wait_s`.

        Raises:
            DuplicateTicket: the owner uses this ticket already.
        """
        self._leases.lease(owner, ticket, hashes, now)
        self._advance(now)

    def renew(self, owner: str, ticket: Ticket, now: float) -> bool:
        """Renew a lease; one that waits needs no renewal. See `BlockCache.renew`."""
        return self._leases.renew(owner, ticket, now)

    def release(self, owner: str, ticket: Ticket, now: float) -> bool:
        """End a lease; one that waits ends without an answer. See `BlockCache.release`."""
        released = self._leases.release(owner, ticket)
        self._advance(now)
        return released

    def forget_owner(self, owner: str) -> None:
        """End all leases and reservations of a client; see `BlockCache.forget_owner`."""
        self._leases.forget_owner(owner)
        self.memory.forget_owner(owner)

    # -- pins --------------------------------------------------------------------------------

    def pin(self, block: BlockHash, kind: PinKind, until_s: float) -> None:
        """Pin a block of either tier, in place of an earlier pin on it.

        A hard pin also holds the blocks before it, and those in memory stay there.

        Raises:
            PinRefused: it is not stored, or hard pins would hold too much.
        """
        if block not in self:
            raise PinRefused(f"block {block.hex()} is not stored here")
        self.pins.pin(block, Pin(kind, until_s), self._store.ancestors(block))

    def unpin(self, block: BlockHash) -> bool:
        """Remove a pin; return whether there was one."""
        return self.pins.unpin(block)

    # -- outcomes of commands ----------------------------------------------------------------

    def on_written(self, block: BlockHash, outcome: TierOutcome, now: float) -> None:
        """Record the end of a `WriteBack`; see `WriteBackScheduler.on_written`."""
        self._writer.on_written(block, outcome, now)
        self._advance(now)

    def on_promoted(self, block: BlockHash, outcome: TierOutcome, now: float) -> None:
        """Record the end of a `Promote`; see `BlockPromoter.on_promoted`."""
        if self._promoter.on_promoted(block, outcome, now):
            self._leases.on_arrived(block, now)
        else:
            self._leases.on_unavailable(block, now)
        self._advance(now)

    def on_erased(self, disk_slot: int) -> None:
        """Record the end of an `Erase`."""
        self.disk.release(disk_slot)

    def discard_damaged(self, block: BlockHash, now: float) -> bool:
        """Remove a block with damaged bytes from memory; the disk's copy of it stays.

        Returns False while a lease holds the block.
        """
        if not self.memory.discard_damaged(block):
            return False
        self.counts.corrupt += 1
        self._store.on_evicted([block])
        self._advance(now)
        return True

    def on_tick(self, now: float) -> None:
        """End expired leases, reservations and pins, and grant leases past their deadline."""
        self.memory.expire(now)
        self.pins.expire(now)
        self._leases.on_tick(now)
        self._writer.on_tick(now)
        self._advance(now)

    def check(self) -> None:
        """Check the tiers, and what is between them."""
        self._store.check()
        self._writer.check()
        self._promoter.check()
        self._leases.check()

    def _advance(self, now: float, n_wanted: int = 0) -> None:
        """Start the writes, evictions and promotions that can start now.

        Args:
            now: seconds.
            n_wanted: slots that a put lacks, whatever the watermarks say.
        """
        self._writer.make_room(now, n_wanted)
        for block in self._promoter.start(now):
            self._leases.on_unavailable(block, now)
