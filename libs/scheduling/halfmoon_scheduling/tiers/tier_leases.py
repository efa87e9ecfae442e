"""Lease blocks of both tiers: at once from memory, or when promotions have brought them there."""

from collections.abc import Collection, Sequence

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_scheduling.cache.block_cache import DuplicateTicket
from halfmoon_scheduling.tiers.promotion import BlockPromoter
from halfmoon_scheduling.tiers.tier_commands import AnswerLease
from halfmoon_scheduling.tiers.tier_store import FOREVER_S, TierStore
from halfmoon_scheduling.tiers.waiting_leases import WaitingLeases


class TierLeases:
    """Grant leases, and hold those that wait for blocks from the disk."""

    def __init__(self, store: TierStore, promoter: BlockPromoter) -> None:
        """Share a store, and the promoter that brings its disk's blocks to memory."""
        self._store = store
        self._promoter = promoter
        self._waiting = WaitingLeases()

    def require_new(self, owner: str, ticket: Ticket) -> None:
        """Check that no waiting lease has this ticket.

        Raises:
            DuplicateTicket: one has it.
        """
        if (owner, ticket) in self._waiting:
            raise DuplicateTicket(f"ticket {ticket!r} of {owner!r} is in use; choose another")

    def lease(self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], now: float) -> None:
        """Lease the longest stored prefix of `hashes`, now or when it has come from the disk.

        Raises:
            DuplicateTicket: the owner uses this ticket already.
        """
        store = self._store
        self.require_new(owner, ticket)
        store.memory.expire(now)
        asked = list(dict.fromkeys(hashes))
        rows = store.memory.find(asked)
        prefix = asked[: len(rows)]
        missing: list[BlockHash] = []
        for block in asked[len(prefix) :] if len(store.disk) else ():
            if block not in store.memory:
                if block not in store.disk:
                    break
                missing.append(block)
            prefix.append(block)
        store.disk.touch(prefix)
        store.tenants.touch(prefix)
        store.counts.hits_disk += len(missing)
        store.counts.hits_memory += len(prefix) - len(missing)
        store.counts.misses += len(asked) - len(prefix)
        if missing:
            prefix = self._wait(owner, ticket, prefix, missing, now)
        else:
            self._answer(owner, ticket, rows, now, ())
        if len(prefix) == len(asked) and prefix:
            self._promoter.read_ahead(prefix[-1])

    def renew(self, owner: str, ticket: Ticket, now: float) -> bool:
        """Renew a lease; one that waits needs no renewal. Return whether there is such a lease."""
        return (owner, ticket) in self._waiting or self._store.memory.renew(owner, ticket, now)

    def release(self, owner: str, ticket: Ticket) -> bool:
        """End a lease; one that waits ends without an answer. Return whether there was one."""
        waited = self._waiting.take((owner, ticket)) is not None
        held = self._store.memory.release(owner, ticket)
        return waited or held

    def forget_owner(self, owner: str) -> None:
        """End all waiting leases of a client that is gone."""
        self._waiting.forget_owner(owner)

    def on_arrived(self, block: BlockHash, now: float) -> None:
        """Add a block that has come to memory to the leases that wait for it."""
        for key, is_complete in self._waiting.on_arrived(block):
            self._store.memory.add_to_lease(*key, block, now, FOREVER_S)
            if is_complete:
                self._decide(*key, now)

    def on_unavailable(self, block: BlockHash, now: float) -> None:
        """Shorten the leases that wait for a block that will not come to memory."""
        for key in self._waiting.on_unavailable(block):
            self._decide(*key, now)

    def on_tick(self, now: float) -> None:
        """Grant leases past their deadline, on what is in memory."""
        for key in self._waiting.overdue(now):
            self._decide(*key, now)

    def check(self) -> None:
        """Check that each waiting lease waits for blocks that are on their way."""
        store = self._store
        for waiting in self._waiting.all():
            assert waiting.missing, "a lease waits for nothing"
            assert waiting.missing <= store.promoting | store.queued.keys()
            assert all(b in store.memory for b in waiting.prefix if b not in waiting.missing)

    def _wait(
        self,
        owner: str,
        ticket: Ticket,
        prefix: list[BlockHash],
        missing: list[BlockHash],
        now: float,
    ) -> list[BlockHash]:
        """Wait for missing blocks; return the prefix that the promotion queue has room for."""
        store = self._store
        if (first_without_room := self._promoter.enqueue(missing)) is not None:
            prefix = prefix[: prefix.index(first_without_room)]
        for block in prefix:
            if block in store.memory:
                store.memory.add_to_lease(owner, ticket, block, now, FOREVER_S)
        until_s = now + store.limits.promotion_wait_s
        if not self._waiting.add((owner, ticket), prefix, missing, until_s):
            self._decide(owner, ticket, now)
        return prefix

    def _decide(self, owner: str, ticket: Ticket, now: float) -> None:
        """Turn a waiting lease into one on the prefix that is in memory."""
        waiting = self._waiting.take((owner, ticket))
        assert waiting is not None, "a lease is decided that does not wait"
        self._store.memory.release(owner, ticket)
        rows = self._store.memory.find(waiting.prefix)
        self._answer(owner, ticket, rows, now, waiting.arrived)

    def _answer(
        self,
        owner: str,
        ticket: Ticket,
        rows: list[int],
        now: float,
        from_disk: Collection[BlockHash],
    ) -> None:
        """Lease the blocks of these rows in memory, and answer with their places."""
        places = self._store.memory.lease_rows(owner, ticket, rows, now)
        n_from_disk = sum(place.hash in from_disk for place in places) if from_disk else 0
        self._store.commands.append(AnswerLease(owner, ticket, tuple(places), n_from_disk))
