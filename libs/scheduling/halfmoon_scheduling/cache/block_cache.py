"""Decide about the memory of a kvstore: slots of blocks, reservations, leases and eviction.

Slots are equal pieces of the store's memory, one block each. The service owns the bytes and the
sockets. A slot is in exactly one of three states:

    free ──reserve──▶ reserved ──commit──▶ stored ──evict──▶ free
      ▲                  │
      └──revoke, expire──┘

A stored block may be leased any number of times. It is evicted only without leases, and not
while a hard pin holds it. Blocks form chains: each hash has a parent. A block goes only after all
its children, stored or reserved. So stored blocks stay reachable from the start of a prompt, and a
reservation keeps its own prefix alive. `victim_selection` decides which block goes first.

A slower tier may lie below this one (see `halfmoon_scheduling.tiers`). Blocks that are there too
are *saved*, and while `saves_first` is set, only saved blocks are evicted.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_table import MAX_CHECKSUM
from halfmoon_scheduling.cache.pins import Pins
from halfmoon_scheduling.cache.stored_blocks import BlockLocation, StoredBlocks
from halfmoon_scheduling.cache.victim_selection import choose_victims

#: Seconds that a client waits when no hold predicts a free slot.
RETRY_S = 1.0


class CacheError(Exception):
    """The base of errors of a block cache.

    CacheError
    ├── CacheFull        no slot is free and no block may be evicted now
    ├── UnknownTicket    the reservation was never made, has ended, or has expired
    └── DuplicateTicket  the owner uses this ticket already
    """

    #: Of `halfmoon_protocol.error_codes`.
    code = error_codes.INVALID


class CacheFull(CacheError):
    """A put of which not one block fits now; nothing changed."""

    code = error_codes.NO_ROOM

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        #: Seconds until a reservation or a lease runs out, so that another try may succeed.
        self.retry_after_s = retry_after_s


class UnknownTicket(CacheError, KeyError):
    """A ticket of no reservation that is open now."""

    code = error_codes.NOT_HELD

    def __str__(self) -> str:
        return str(self.args[0])


class DuplicateTicket(CacheError, ValueError):
    """A ticket that names another reservation or lease of its owner."""

    code = error_codes.ID_IN_USE


class SlotReservation(NamedTuple):
    """The slots of a reservation, and the blocks evicted for it."""

    #: Blocks to write, in prefix order, each with its slot.
    places: list[tuple[BlockHash, int]]
    #: Evicted blocks, in the order of eviction.
    evicted: list[BlockHash]


class BlockInspection(NamedTuple):
    """One stored block as an operator sees it."""

    n_leases: int
    #: When it was stored.
    stored_s: float


class _Pending(msgspec.Struct, frozen=True, gc=False):
    """A reserved block."""

    slot: int
    parent: BlockHash | None
    depth: int


@dataclass(slots=True)
class _Reservation:
    """A hold on pending blocks."""

    hashes: list[BlockHash]
    deadline_s: float
    #: The last block of the prompt that is put, if it is among `hashes`.
    tail: BlockHash | None = None


@dataclass(slots=True)
class _Lease:
    """A hold on stored blocks, by their rows, which stay theirs while it lasts."""

    rows: list[int]
    deadline_s: float


_Key = tuple[str, Ticket]


def _ignore_end(owner: str, ticket: Ticket) -> None:
    """Do nothing about the end of a lease or reservation."""


class BlockCache:
    """Keep blocks in slots, with two-phase puts, leases and eviction."""

    def __init__(
        self,
        n_slots: int,
        *,
        policy: str = "lru",
        high_watermark: float = 0.95,
        low_watermark: float = 0.90,
        reservation_ttl_s: float = 30.0,
        lease_ttl_s: float = 10.0,
        pins: Pins | None = None,
    ) -> None:
        """Start with an empty cache.

        Args:
            n_slots: blocks that fit.
            policy: a name in `EVICTION_POLICIES`.
            high_watermark: share of used slots above which `evict_to_watermark` evicts.
            low_watermark: share of used slots down to which it evicts.
            reservation_ttl_s: seconds after which an uncommitted reservation is discarded.
            lease_ttl_s: seconds after which a lease without renewal is discarded.
            pins: blocks that are evicted last, or never; None: no pins.

        Raises:
            ValueError: no slots, watermarks out of order, or an unknown policy.
        """
        if n_slots < 1:
            raise ValueError(f"n_slots is {n_slots}, a cache has at least 1")
        if not 0 <= low_watermark <= high_watermark <= 1:
            raise ValueError(
                f"watermarks must be 0 <= low <= high <= 1, not {low_watermark}, {high_watermark}"
            )
        self.n_slots = n_slots
        self.reservation_ttl_s = reservation_ttl_s
        self.lease_ttl_s = lease_ttl_s
        #: Used slots above which `evict_to_watermark` evicts, and down to which.
        self.high_slots = high_watermark * n_slots
        self.low_slots = low_watermark * n_slots
        self.pins = pins or Pins()
        #: Called with owner and ticket when a lease or reservation ends, before its slots are
        #: free; changes nothing here.
        self.on_ended: Callable[[str, Ticket], None] = _ignore_end
        #: Whether only saved blocks may be evicted.
        self.saves_first = False
        #: Free slots. Disjoint from the slots in `_stored` and `_pending`.
        self._free = array("i", range(n_slots - 1, -1, -1))
        self._stored = StoredBlocks(policy)
        #: Reserved blocks; each is in exactly one reservation, and not in `_stored`.
        self._pending: dict[BlockHash, _Pending] = {}
        self._reservations: dict[_Key, _Reservation] = {}
        self._leases: dict[_Key, _Lease] = {}
        #: The earliest time at which a reservation or a lease may expire.
        self._soonest_s = math.inf

    # -- stored blocks -----------------------------------------------------------------------

    @property
    def n_stored(self) -> int:
        """Blocks that can be read."""
        return len(self._stored)

    @property
    def n_reserved(self) -> int:
        """Blocks reserved for a writer."""
        return len(self._pending)

    @property
    def n_leased(self) -> int:
        """Stored blocks with at least one lease."""
        return self._stored.n_leased

    @property
    def n_used(self) -> int:
        """Slots that are not free."""
        return self.n_slots - len(self._free)

    def get(self, block: BlockHash) -> BlockLocation | None:
        """Return the location of a stored block; None if it is not stored."""
        stored = self._stored.get(block)
        return None if stored is None else BlockLocation(block, stored.slot, stored.checksum)

    def find(self, blocks: Iterable[BlockHash]) -> list[int]:
        """Return the rows of these blocks, up to the first one that is not stored.

        They are for `lease_rows`, before anything else changes this cache.
        """
        return self._stored.rows(blocks)

    def inspect(self, block: BlockHash) -> BlockInspection | None:
        """Return the leases of a stored block and its age; None if it is not stored."""
        stored = self._stored.get(block)
        return None if stored is None else BlockInspection(stored.n_leases, stored.stored_s)

    def parent_and_depth(self, block: BlockHash) -> tuple[BlockHash | None, int] | None:
        """Return parent and depth of a stored block; None if it is not stored."""
        stored = self._stored.get(block)
        return None if stored is None else (stored.parent, stored.depth)

    def parent_of(self, block: BlockHash) -> BlockHash | None:
        """Return the parent of a stored or reserved block; None for a start, and for others."""
        held = self._pending.get(block) or self._stored.get(block)
        return None if held is None else held.parent

    def has_children(self, block: BlockHash) -> bool:
        """Return whether a child of this block is stored or reserved, even if the block is not."""
        return self._stored.n_children(block) > 0

    def hashes(self) -> list[BlockHash]:
        """Return all stored blocks."""
        return list(self._stored)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._stored

    # -- writing -----------------------------------------------------------------------------

    def reserve(
        self,
        owner: str,
        ticket: Ticket,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        now: float,
        *,
        depth: int | None = None,
        ends_prompt: bool = True,
        elsewhere: Container[BlockHash] = (),
        ttl_s: float | None = None,
    ) -> SlotReservation:
        """Reserve slots for those of `hashes` that are neither stored nor reserved.

        When not all of them fit, the first ones get slots: a prefix without its tail is useful, a
        tail without its prefix is not. Blocks of this same prompt are not evicted.

        Args:
            owner: the client.
            ticket: the client's name for this reservation.
            hashes: blocks in prefix order, each the child of the one before.
            parent: the block before the first; None at the start of a prompt.
            now: seconds.
            depth: blocks before the first; None: as this cache knows.
            ends_prompt: whether the last of `hashes` is the last of its prompt.
            elsewhere: blocks that need no slot because another tier has them; false if empty.
            ttl_s: seconds until the reservation expires; None: `reservation_ttl_s`.

        Raises:
            CacheFull: not even one fits; nothing changes, except that expired holds end.
            DuplicateTicket: the owner uses this ticket already.
        """
        self.expire(now)
        key = self._new_key(owner, ticket)
        parents = dict(zip(hashes, [parent, *hashes], strict=False))
        missing = [h for h in self._stored.absent(parents) if h not in self._pending]
        if elsewhere:
            missing = [h for h in missing if h not in elsewhere]
        evicted: list[BlockHash] = []
        if len(missing) > len(self._free):
            keep = {h for h in (*parents, parent) if h is not None and h in self._stored}
            evicted = self._choose(len(missing) - len(self._free), keep)
            if not evicted and not self._free:
                raise self._full(len(missing), now)
            for block in evicted:
                self._drop(block)
        places = [(h, self._free.pop()) for h in missing[: len(self._free)]]
        if depth is None:
            before = None if parent is None else self._stored.get(parent)
            depth = 0 if before is None else before.depth + 1
        depths = {block: depth + i for i, block in enumerate(parents)}
        for block, slot in places:
            self._pending[block] = _Pending(slot, parents[block], depths[block])
            self._stored.await_child(parents[block])
        self._stored.touch(self._stored.rows_here(parents))
        taken = [block for block, _ in places]
        tail = hashes[-1] if hashes and ends_prompt else None
        ttl_s = self.reservation_ttl_s if ttl_s is None else ttl_s
        self._reservations[key] = _Reservation(taken, now + ttl_s, tail)
        self._soonest_s = min(self._soonest_s, now + ttl_s)
        return SlotReservation(places, evicted)

    def commit(
        self, owner: str, ticket: Ticket, checksums: Sequence[int], now: float
    ) -> list[BlockHash]:
        """Store the blocks of a reservation, whose bytes are written.

        Args:
            owner: the client.
            ticket: of its reservation.
            checksums: one for each of the reservation's places, in their order.
            now: seconds.

        Returns:
            The newly stored blocks, in prefix order.

        Raises:
            UnknownTicket: never reserved, revoked or expired; the client writes again.
            ValueError: not one checksum of 64 bits per place; the reservation stays.
        """
        self.expire(now)
        key = (owner, ticket)
        if (reservation := self._reservations.get(key)) is None:
            raise UnknownTicket(
                f"no reservation {ticket!r} of {owner!r}: it is not made, revoked, committed, "
                f"or older than {self.reservation_ttl_s} s"
            )
        if len(checksums) != len(reservation.hashes):
            raise ValueError(
                f"{len(checksums)} checksums for the {len(reservation.hashes)} places of "
                f"reservation {ticket!r}"
            )
        wrong = next((c for c in checksums if not 0 <= c <= MAX_CHECKSUM), None)
        if wrong is not None:
            raise ValueError(f"checksum {wrong} of reservation {ticket!r} is not one of 64 bits")
        del self._reservations[key]
        self.on_ended(owner, ticket)
        pairs = list(zip(reservation.hashes, checksums, strict=True))
        for block, checksum in reversed(pairs):  # the last one is the first to be evicted
            pending = self._pending.pop(block)
            self._stored.add(
                block, pending.parent, pending.depth, checksum, pending.slot, now,
                tail=block == reservation.tail,
            )  # fmt: skip
            self._stored.cancel_await_child(pending.parent)
        return reservation.hashes

    def revoke(self, owner: str, ticket: Ticket) -> bool:
        """Cancel a reservation; return whether there was one."""
        if (reservation := self._reservations.pop((owner, ticket), None)) is None:
            return False
        self.on_ended(owner, ticket)
        for block in reservation.hashes:
            pending = self._pending.pop(block)
            self._free.append(pending.slot)
            self._stored.cancel_await_child(pending.parent)
        return True

    # -- reading -----------------------------------------------------------------------------

    def lease(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], now: float
    ) -> list[BlockLocation]:
        """Lease the longest stored prefix of `hashes`; an empty one makes no lease.

        Raises:
            DuplicateTicket: the owner uses this ticket already.
        """
        self.expire(now)
        return self.lease_rows(owner, ticket, self.find(dict.fromkeys(hashes)), now)

    def lease_rows(
        self, owner: str, ticket: Ticket, rows: list[int], now: float
    ) -> list[BlockLocation]:
        """Lease blocks by the rows that `find` returned; no rows make no lease.

        Raises:
            DuplicateTicket: the owner uses this ticket already.
        """
        key = self._new_key(owner, ticket)
        if not rows:
            return []
        self._stored.add_leases(rows)
        self._stored.touch(rows)
        self._hold_lease(key, _Lease(rows, now + self.lease_ttl_s))
        return self._stored.locations(rows)

    def add_to_lease(
        self, owner: str, ticket: Ticket, block: BlockHash, now: float, ttl_s: float
    ) -> None:
        """Add a stored block to a lease, which is created if needed.

        Args:
            owner: the client.
            ticket: of the lease, or for it.
            block: stored, and not in this lease yet.
            now: seconds.
            ttl_s: seconds until the whole lease expires unless it is renewed.
        """
        lease = self._leases.get((owner, ticket)) or _Lease([], 0.0)
        lease.deadline_s = now + ttl_s
        rows = self._stored.rows([block])
        assert rows, "a block is leased that is not stored"
        lease.rows += rows
        self._stored.add_leases(rows)
        self._hold_lease((owner, ticket), lease)

    def renew(self, owner: str, ticket: Ticket, now: float) -> bool:
        """Extend a lease by `lease_ttl_s`, or a reservation by `reservation_ttl_s`, from now.

        Returns:
            Whether there still was one.
        """
        self.expire(now)
        key = (owner, ticket)
        if (lease := self._leases.get(key)) is not None:
            lease.deadline_s = now + self.lease_ttl_s
        if (put := self._reservations.get(key)) is not None:
            put.deadline_s = max(put.deadline_s, now + self.reservation_ttl_s)
        self._soonest_s = min(self._soonest_s, now + self.lease_ttl_s)
        return lease is not None or put is not None

    def release(self, owner: str, ticket: Ticket) -> bool:
        """End a lease; return whether there was one."""
        if (lease := self._leases.pop((owner, ticket), None)) is None:
            return False
        self.on_ended(owner, ticket)
        self._stored.remove_leases(lease.rows)
        return True

    def holds(self, owner: str, ticket: Ticket) -> bool:
        """Return whether a lease or reservation of this owner and ticket is open."""
        return (owner, ticket) in self._leases or (owner, ticket) in self._reservations

    def has_reservation(self, key: tuple[str, Ticket]) -> bool:
        """Return whether a reservation of this owner and ticket is open."""
        return key in self._reservations

    def is_reserved(self, block: BlockHash) -> bool:
        """Return whether a writer has reserved a slot for this block."""
        return block in self._pending

    def first_release_s(self, now: float) -> float:
        """Return the seconds until the first reservation or lease expires.

        Those of I/O end with it and have no deadline. Where there are no others, no time is
        known: it is `RETRY_S` then.
        """
        deadlines = [hold.deadline_s for hold in self._reservations.values() if hold.hashes]
        deadlines += [lease.deadline_s for lease in self._leases.values()]
        first_s = min(deadlines, default=math.inf)
        return first_s - now if math.isfinite(first_s) else RETRY_S

    # -- expiry and eviction -----------------------------------------------------------------

    def forget_owner(self, owner: str) -> None:
        """Cancel all reservations and end all leases of a client that is gone."""
        for key in [key for key in self._reservations if key[0] == owner]:
            self.revoke(*key)
        for key in [key for key in self._leases if key[0] == owner]:
            self.release(*key)

    def expire(self, now: float) -> None:
        """End expired reservations and leases."""
        if now < self._soonest_s:
            return
        for key in [key for key, r in self._reservations.items() if r.deadline_s <= now]:
            self.revoke(*key)
        for key in [key for key, lease in self._leases.items() if lease.deadline_s <= now]:
            self.release(*key)
        self._soonest_s = min(self._deadlines(), default=math.inf)

    def evict_to_watermark(self, now: float) -> list[BlockHash]:
        """Evict ahead of demand, when above the high watermark and down to the low one.

        Returns:
            The evicted blocks; fewer than needed when many are leased or pinned.
        """
        self.expire(now)
        if self.n_used <= self.high_slots:
            return []
        evicted = self._choose(self.n_used - int(self.low_slots), keep=set())
        for block in evicted:
            self._drop(block)
        return evicted

    def victims(self, n: int) -> list[BlockHash]:
        """Return the next `n` blocks to evict, saved or not; change nothing."""
        return self._choose(n, keep=set(), unsaved_too=True)

    def mark_saved(self, block: BlockHash) -> None:
        """Mark a stored block as stored in a slower tier too."""
        self._stored.mark_saved(block)

    def is_saved(self, block: BlockHash) -> bool:
        """Return whether a stored block is in a slower tier too."""
        return self._stored[block].saved

    def evict(self, block: BlockHash) -> bool:
        """Evict a block, saved or not; return whether it was evicted.

        A block stays that is leased, held by a hard pin or has children.
        """
        stored = self._stored.get(block)
        if stored is None or stored.n_leases or self.has_children(block):
            return False
        if block in self.pins.held:
            return False
        self._drop(block)
        return True

    def discard_damaged(self, block: BlockHash) -> bool:
        """Remove a damaged block, whatever its pins and children.

        Returns False while it is leased, or if it is not stored.
        """
        stored = self._stored.get(block)
        if stored is None or stored.n_leases:
            return False
        self._drop(block)
        return True

    def check(self) -> None:
        """Check that every slot is in one state, and that all counts are right."""
        slots = [
            *self._free,
            *(self._stored[block].slot for block in self._stored),
            *(pending.slot for pending in self._pending.values()),
        ]
        assert sorted(slots) == list(range(self.n_slots)), "a slot is lost or held twice"
        assert not any(block in self._stored for block in self._pending)
        reserved = [block for r in self._reservations.values() for block in r.hashes]
        assert sorted(reserved) == sorted(self._pending), "reservations and reserved blocks differ"
        parents = (pending.parent for pending in self._pending.values())
        self._stored.check(awaited=Counter(p for p in parents if p is not None))
        leases: dict[BlockHash, int] = {}
        for lease in self._leases.values():
            for row in lease.rows:
                block = self._stored.block(row)
                leases[block] = leases.get(block, 0) + 1
        for block in self._stored:
            assert self._stored[block].n_leases == leases.pop(block, 0), "leases are miscounted"
        assert not leases, "a leased block is not stored"
        assert min(self._deadlines(), default=self._soonest_s) >= self._soonest_s, "a hold too long"

    # -- internal ----------------------------------------------------------------------------

    def _choose(
        self, n: int, keep: set[BlockHash], *, unsaved_too: bool = False
    ) -> list[BlockHash]:
        """Return up to `n` blocks to evict, children before parents; change nothing."""
        return choose_victims(
            self._stored,
            n,
            keep=keep,
            saved_only=self.saves_first and not unsaved_too,
            pins=self.pins,
        )

    def _drop(self, block: BlockHash) -> None:
        self._free.append(self._stored.remove(block))

    def _deadlines(self) -> list[float]:
        """Return the times at which reservations and leases expire."""
        deadlines = [reservation.deadline_s for reservation in self._reservations.values()]
        return deadlines + [lease.deadline_s for lease in self._leases.values()]

    def _hold_lease(self, key: _Key, lease: _Lease) -> None:
        self._leases[key] = lease
        self._soonest_s = min(self._soonest_s, lease.deadline_s)

    def _new_key(self, owner: str, ticket: Ticket) -> _Key:
        key = (owner, ticket)
        if key in self._reservations or key in self._leases:
            raise DuplicateTicket(f"ticket {ticket!r} of {owner!r} is in use; choose another")
        return key

    def _full(self, n_wanted: int, now: float) -> CacheFull:
        first_s = self.first_release_s(now)
        return CacheFull(
            f"{n_wanted} blocks wanted; of {self.n_slots} slots {self.n_reserved} are reserved, "
            f"{self.n_leased} leased, {self.pins.n_held} held by hard pins, and the other stored "
            f"blocks are their or this prompt's prefix: retry in {first_s:.1f} s, or give the "
            "store more memory",
            first_s,
        )
