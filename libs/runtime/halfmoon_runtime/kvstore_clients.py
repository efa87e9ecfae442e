"""Call kvstores: lease blocks to read, reserve places to write, commit and copy blocks.

There is one link per kvstore, opened at its first use. Tickets match answers to their requests. A
kvstore that does not answer is skipped: its blocks are then computed, not kept, or not copied.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar, assert_never

import structlog

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    CommitBlocks,
    KvstoreAddress,
    KvstoreRefused,
    LeaseBlocks,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    ToKvstore,
    ToKvstoreClient,
    VerifyBlocks,
)
from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.keyed_locks import KeyedLocks

log = structlog.get_logger()

#: Shortest time between two renewals of a lease, in seconds.
_LEAST_PAUSE_S = 0.05

_Answer = TypeVar(
    "_Answer", BlocksLeased, BlocksReserved, BlocksCommitted, BlocksSnapshot, BlocksReplicated
)


class KvstoreUnavailable(Exception):
    """A kvstore did not answer in time, refused, or is gone; the text gives the reason.

    KvstoreUnavailable
    └── KvstoreDeclined   the kvstore answered with a refusal
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        #: Seconds after which a retry may help, by the kvstore's answer; 0: unknown.
        self.retry_after_s = retry_after_s


class KvstoreDeclined(KvstoreUnavailable):
    """A healthy kvstore refused the request; the text is its reason."""


class HeldLease(Protocol):
    """A lease on blocks, as `KvstoreClient.hold_lease` uses it."""

    @property
    def ticket(self) -> Ticket:
        """Name of the lease."""
        ...

    @property
    def expires_s(self) -> float:
        """Seconds until the lease ends unless it is renewed."""
        ...


class KvstoreClient:
    """Call one kvstore over one link."""

    def __init__(self, name: str, link: WorkerLink, timeout_s: float) -> None:
        self.name = name
        self._link = link
        self._timeout_s = timeout_s
        self._tickets = itertools.count(1)
        #: Requests that wait for their answer.
        self._waiting: dict[Ticket, asyncio.Future[ToKvstoreClient]] = {}
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """True while the link is up."""
        return not self._reader.done()

    async def lease(
        self,
        layout: KvLayout,
        hashes: tuple[BlockHash, ...],
        trace: TraceContext | None = None,
    ) -> BlocksLeased:
        """Lease the longest stored prefix of `hashes`, which pins it.

        Raises:
            KvstoreUnavailable: no lease is held.
        """
        ticket = self._ticket()
        wanted = LeaseBlocks(ticket=ticket, layout=layout, hashes=hashes, trace=trace)
        leased = await self._ask(wanted, ticket, BlocksLeased)
        if fault := _lease_fault(leased, layout, hashes):
            await self.release(ticket)
            raise KvstoreUnavailable(f"{self.name}: {fault}")
        return leased

    async def reserve(
        self,
        layout: KvLayout,
        hashes: tuple[BlockHash, ...],
        parent: BlockHash | None,
        token_ids: tuple[int, ...],
        tenant: str = "",
    ) -> BlocksReserved:
        """Reserve places for those of `hashes` that are not stored.

        Raises:
            KvstoreUnavailable: nothing is reserved.
        """
        ticket = self._ticket()
        put = ReserveBlocks(
            ticket=ticket,
            layout=layout,
            hashes=hashes,
            parent=parent,
            token_ids=token_ids,
            tenant=tenant,
        )
        reserved = await self._ask(put, ticket, BlocksReserved)
        places = {place.hash for place in reserved.places}
        if not places <= set(hashes) or len(places) < len(reserved.places):
            await self.revoke(ticket)
            raise KvstoreUnavailable(f"{self.name} reserved blocks that were not asked for")
        if fault := _places_fault(reserved, layout):
            await self.revoke(ticket)
            raise KvstoreUnavailable(f"{self.name}: {fault}")
        return reserved

    async def commit(self, ticket: Ticket, checksums: tuple[int, ...]) -> None:
        """Commit a reservation whose bytes are written.

        Raises:
            KvstoreUnavailable: it is unknown whether the blocks are served.
        """
        await self._ask(CommitBlocks(ticket=ticket, checksums=checksums), ticket, BlocksCommitted)

    async def revoke(self, ticket: Ticket) -> None:
        """Revoke a reservation."""
        await self._tell(RevokeBlocks(ticket=ticket))

    async def renew(self, ticket: Ticket) -> None:
        """Renew a lease, or a reservation.

        Nothing waits for the answer: kvstores of earlier builds send none. A lease that is over is
        logged, and its reader finds out by the checksums.
        """
        await self._tell(RenewLease(ticket=ticket))

    async def release(self, ticket: Ticket) -> None:
        """End a lease."""
        await self._tell(ReleaseLease(ticket=ticket))

    @asynccontextmanager
    async def hold_lease(self, lease: HeldLease) -> AsyncIterator[None]:
        """Renew a lease for the length of a `with` block; then end it."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(max(_LEAST_PAUSE_S, lease.expires_s / 3))
                await self.renew(lease.ticket)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await self.release(lease.ticket)

    async def snapshot(self) -> BlocksSnapshot:
        """Return the hashes of all stored blocks, and the free bytes.

        Raises:
            KvstoreUnavailable: no snapshot came.
        """
        ticket = self._ticket()
        return await self._ask(SnapshotBlocks(ticket=ticket), ticket, BlocksSnapshot)

    async def replicate(self, order: ReplicateBlocks, timeout_s: float) -> BlocksReplicated:
        """Make the kvstore copy blocks from another one.

        Raises:
            KvstoreUnavailable: it refused, or did not answer in time.
        """
        return await self._ask(order, order.ticket, BlocksReplicated, timeout_s)

    async def report_damaged(self, hashes: tuple[BlockHash, ...]) -> None:
        """Report blocks that a reader found damaged; the kvstore re-checks them."""
        await self._tell(VerifyBlocks(hashes=hashes))

    async def close(self) -> None:
        """Close the link."""
        self._reader.cancel()
        await self._link.close()

    def _ticket(self) -> Ticket:
        return Ticket(str(next(self._tickets)))

    async def _ask(
        self,
        question: ToKvstore,
        ticket: Ticket,
        kind: type[_Answer],
        timeout_s: float | None = None,
    ) -> _Answer:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ToKvstoreClient] = loop.create_future()
        self._waiting[ticket] = future
        # A timer of its own takes half the time of `asyncio.timeout`.
        deadline = loop.call_later(timeout_s, _expire, future)
        try:
            await self._link.send(question)
            answer = await future
        except TimeoutError:
            raise KvstoreUnavailable(
                f"{self.name} did not answer {type(question).__name__} in {timeout_s} s"
            ) from None
        except PeerUnreachable as error:
            raise KvstoreUnavailable(f"{self.name}: {error}") from None
        finally:
            deadline.cancel()
            self._waiting.pop(ticket, None)
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, KvstoreRefused):
            raise KvstoreDeclined(f"{self.name}: {answer.reason}", answer.retry_after_s)
        raise KvstoreUnavailable(f"{self.name} answered {answer!r}")

    async def _tell(self, message: ToKvstore) -> None:
        try:
            await self._link.send(message)
        except PeerUnreachable as error:
            log.info("kvstore_not_notified", kvstore=self.name, reason=str(error))

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._link.receive()
                if not isinstance(answer, ToKvstoreClient):
                    record_drop("unexpected", self.name, type(answer).__name__)
                    continue
                if isinstance(answer, LeaseRenewed):
                    continue  # another question may wait under the same ticket
                future = self._waiting.get(answer.ticket)
                if future is not None and not future.done():
                    future.set_result(answer)
                else:
                    await self._on_late_answer(answer)
        except PeerUnreachable as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

    async def _on_late_answer(self, answer: ToKvstoreClient) -> None:
        """Release what a kvstore holds for a request that has timed out."""
        match answer:
            case BlocksLeased(ticket=ticket):
                await self._tell(ReleaseLease(ticket=ticket))
            case BlocksReserved(ticket=ticket):
                await self._tell(RevokeBlocks(ticket=ticket))
            case KvstoreRefused(code=error_codes.NOT_HELD, ticket=ticket, reason=reason):
                log.warning("lease_is_over", kvstore=self.name, ticket=ticket, reason=reason)
            case (
                BlocksCommitted()
                | BlocksReplicated()
                | BlocksSnapshot()
                | LeaseRenewed()
                | KvstoreRefused()
            ):
                pass  # the kvstore holds nothing for the question
            case _:
                assert_never(answer)


def _expire(future: "asyncio.Future[ToKvstoreClient]") -> None:
    """End a question that was not answered in time."""
    if not future.done():
        future.set_exception(TimeoutError())


def _lease_fault(leased: BlocksLeased, layout: KvLayout, hashes: tuple[BlockHash, ...]) -> str:
    """Describe why a lease is not one of a prefix of these blocks; empty if it is."""
    if not leased.places:
        return ""
    asked = [*dict.fromkeys(hashes)]
    if [place.hash for place in leased.places] != asked[: len(leased.places)]:
        return "leased blocks that were not asked for"
    return _places_fault(leased, layout) or ("" if leased.expires_s else "a lease of no time")


def _places_fault(answer: BlocksLeased | BlocksReserved, layout: KvLayout) -> str:
    """Describe a place outside of the region; empty if there is none."""
    last = answer.region.length - layout.block_bytes
    if not answer.places or max([place.offset for place in answer.places]) <= last:
        return ""
    beyond = next(place for place in answer.places if place.offset > last)
    return (
        f"a block of {layout.block_bytes} bytes at byte {beyond.offset} of a region of "
        f"{answer.region.length}"
    )


class KvstoreClients:
    """Keep a client for each kvstore that a process calls."""

    def __init__(self, network: Network, timeout_s: float) -> None:
        self._network = network
        self._timeout_s = timeout_s
        self._clients: dict[KvstoreAddress, KvstoreClient] = {}
        #: Held while a kvstore is dialled, by its name: one that hangs does not delay the others.
        self._dialling: KeyedLocks[WorkerId] = KeyedLocks()

    async def client_for(self, address: KvstoreAddress) -> KvstoreClient:
        """Return the connected client of this kvstore.

        Raises:
            KvstoreUnavailable: the kvstore can't be reached in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._connected(address)
        except TimeoutError:
            raise KvstoreUnavailable(
                f"{address.worker_id} is not connected in {self._timeout_s} s"
            ) from None

    async def _connected(self, address: KvstoreAddress) -> KvstoreClient:
        async with self._dialling.lock(address.worker_id):
            client = self._clients.get(address)
            if client is not None and client.alive:
                return client
            # Only clients that are down: the address comes from a caller, and may be wrong.
            # All are taken out before the first wait: another dial finds none of them.
            down = [a for a, known in self._clients.items() if not known.alive]
            for stale in [self._clients.pop(a) for a in down]:
                await stale.close()
            try:
                link = await self._network.dial(address.commands, key_id=address.key_id)
            except PeerUnreachable as error:
                raise KvstoreUnavailable(f"{address.worker_id}: {error}") from None
            self._clients[address] = KvstoreClient(address.worker_id, link, self._timeout_s)
            return self._clients[address]

    async def close(self) -> None:
        """Close the links to all kvstores."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
