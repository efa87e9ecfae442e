"""A client's side of the kvstores: leases to read under, reservations to write into.

One link per kvstore, made when first needed. Answers find their question by ticket. A kvstore
that does not answer is done without: blocks are then computed, not kept, or not copied.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar, assert_never

import structlog

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

log = structlog.get_logger()

#: Seconds between two renewals of a lease, at the least.
_LEAST_PAUSE_S = 0.05

_Answer = TypeVar(
    "_Answer", BlocksLeased, BlocksReserved, BlocksCommitted, BlocksSnapshot, BlocksReplicated
)


class KvstoreUnavailable(Exception):
    """It did not answer in time, refused, or is gone: the text says which and why.

    KvstoreUnavailable
    └── KvstoreDeclined   it answered, and said no
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        #: Seconds after which it says that another try may help; 0: it does not say so.
        self.retry_after_s = retry_after_s


class KvstoreDeclined(KvstoreUnavailable):
    """It is well and won't, or can't: the text is its reason."""


class KvstoreClient:
    """One kvstore, over one link."""

    def __init__(self, name: str, link: WorkerLink, timeout_s: float) -> None:
        self.name = name
        self._link = link
        self._timeout_s = timeout_s
        self._tickets = itertools.count(1)
        #: Questions without an answer yet.
        self._waiting: dict[Ticket, asyncio.Future[ToKvstoreClient]] = {}
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether the link is up."""
        return not self._reader.done()

    async def lease(
        self,
        layout: KvLayout,
        hashes: tuple[BlockHash, ...],
        trace: TraceContext | None = None,
    ) -> BlocksLeased:
        """Pin the longest stored prefix of `hashes`.

        Raises:
            KvstoreUnavailable: no lease is held.
        """
        ticket = self._ticket()
        wanted = LeaseBlocks(ticket=ticket, layout=layout, hashes=hashes, trace=trace)
        leased = await self._ask(wanted, ticket, BlocksLeased)
        asked = tuple(dict.fromkeys(hashes))
        if tuple(place.hash for place in leased.places) != asked[: len(leased.places)]:
            await self.release(ticket)
            raise KvstoreUnavailable(f"{self.name} leased blocks that were not asked for")
        if (fault := _places_fault(leased, layout)) or (leased.places and not leased.expires_s):
            await self.release(ticket)
            raise KvstoreUnavailable(f"{self.name}: {fault or 'a lease of no time'}")
        return leased

    async def reserve(
        self,
        layout: KvLayout,
        hashes: tuple[BlockHash, ...],
        parent: BlockHash | None,
        token_ids: tuple[int, ...],
        tenant: str = "",
    ) -> BlocksReserved:
        """Get room for those of `hashes` that are not stored.

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
        """The bytes are written.

        Raises:
            KvstoreUnavailable: whether they are served is unknown.
        """
        await self._ask(CommitBlocks(ticket=ticket, checksums=checksums), ticket, BlocksCommitted)

    async def revoke(self, ticket: Ticket) -> None:
        """Give a reservation back."""
        await self._tell(RevokeBlocks(ticket=ticket))

    async def renew(self, ticket: Ticket) -> None:
        """Keep a lease."""
        await self._tell(RenewLease(ticket=ticket))

    async def release(self, ticket: Ticket) -> None:
        """End a lease."""
        await self._tell(ReleaseLease(ticket=ticket))

    @asynccontextmanager
    async def hold_lease(self, lease: BlocksLeased) -> AsyncIterator[None]:
        """Keep a lease for the length of a `with` block, however long that is; then end it."""

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
        """All that it stores, and how much room it has.

        Raises:
            KvstoreUnavailable: it does not say.
        """
        ticket = self._ticket()
        return await self._ask(SnapshotBlocks(ticket=ticket), ticket, BlocksSnapshot)

    async def replicate(self, order: ReplicateBlocks, timeout_s: float) -> BlocksReplicated:
        """Have it copy blocks from another kvstore.

        Raises:
            KvstoreUnavailable: it does not, or does not say so in time.
        """
        return await self._ask(order, order.ticket, BlocksReplicated, timeout_s)

    async def report_damaged(self, hashes: tuple[BlockHash, ...]) -> None:
        """Say that these were found damaged; it looks for itself."""
        await self._tell(VerifyBlocks(hashes=hashes))

    async def close(self) -> None:
        """Hang up."""
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
        future: asyncio.Future[ToKvstoreClient] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        try:
            await self._link.send(question)
            # Not `wait_for`, which (until Python 3.12) loses a cancellation that comes together
            # with the answer.
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise KvstoreUnavailable(
                f"{self.name} did not answer {type(question).__name__} in {timeout_s} s"
            ) from None
        except PeerUnreachable as error:
            raise KvstoreUnavailable(f"{self.name}: {error}") from None
        finally:
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
            log.info("kvstore_not_told", kvstore=self.name, reason=str(error))

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._link.receive()
                if not isinstance(answer, ToKvstoreClient):
                    record_drop("unexpected", self.name, type(answer).__name__)
                    continue
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
        """Give back what a kvstore holds for a question that is no longer waited for."""
        match answer:
            case BlocksLeased(ticket=ticket):
                await self._tell(ReleaseLease(ticket=ticket))
            case BlocksReserved(ticket=ticket):
                await self._tell(RevokeBlocks(ticket=ticket))
            case BlocksCommitted() | BlocksReplicated() | BlocksSnapshot() | KvstoreRefused():
                pass  # nothing is held
            case _:
                assert_never(answer)


def _places_fault(answer: BlocksLeased | BlocksReserved, layout: KvLayout) -> str:
    """Which place lies outside of the region; empty when none does."""
    last = answer.region.length - layout.block_bytes
    beyond = next((place for place in answer.places if place.offset > last), None)
    if beyond is None:
        return ""
    return (
        f"a block of {layout.block_bytes} bytes at byte {beyond.offset} of a region of "
        f"{answer.region.length}"
    )


class KvstoreClients:
    """All kvstores that a process talks to."""

    def __init__(self, network: Network, timeout_s: float) -> None:
        self._network = network
        self._timeout_s = timeout_s
        self._clients: dict[KvstoreAddress, KvstoreClient] = {}
        #: Held while one kvstore is dialled, by its name: one that hangs keeps nobody from others.
        self._dialling: defaultdict[WorkerId, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def client_for(self, address: KvstoreAddress) -> KvstoreClient:
        """The client for this kvstore, connected.

        Raises:
            KvstoreUnavailable: it can't be reached, or not in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._connected(address)
        except TimeoutError:
            raise KvstoreUnavailable(
                f"{address.worker_id} is not connected in {self._timeout_s} s"
            ) from None

    async def _connected(self, address: KvstoreAddress) -> KvstoreClient:
        async with self._dialling[address.worker_id]:
            client = self._clients.get(address)
            if client is not None and client.alive:
                return client
            # Only those that are down: an address is a caller's word, and may be wrong.
            for stale in [a for a, known in self._clients.items() if not known.alive]:
                await self._clients.pop(stale).close()
            try:
                link = await self._network.dial(address.commands)
            except PeerUnreachable as error:
                raise KvstoreUnavailable(f"{address.worker_id}: {error}") from None
            self._clients[address] = KvstoreClient(address.worker_id, link, self._timeout_s)
            return self._clients[address]

    async def close(self) -> None:
        """Hang up everywhere."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
