"""The kvstore at work: commands in, answers and KV events out.

`BlockCache` decides what is where; this shell owns the memory, the port and the clock. It is
the only authority over its own blocks: what conductors know of them they know from its
events.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog

from halfmoon_kvstore.journal import MEDIUM, stored_events
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import BlockHash, ConductorId, Ticket
from halfmoon_protocol.kv_events import BlockRemoved
from halfmoon_protocol.layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReserved,
    BlocksSnapshot,
    Cancel,
    CommitBlocks,
    Hello,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    Message,
    Place,
    ReleaseLease,
    RenewLease,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    Unwelcome,
    Welcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import Region
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.gauges import Readings
from halfmoon_runtime.network import PeerId, PeerUnreachable, Port
from halfmoon_scheduling.block_cache import BlockCache, CacheFull, UnknownTicket

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.25


@dataclass(frozen=True)
class _Put:
    """A put under way, and until when."""

    reserved: ReserveBlocks
    deadline_s: float


class KvstoreWorker:
    """Serves one port from one region of memory."""

    def __init__(
        self,
        port: Port,
        region: Region,
        info: WorkerInfo,
        settings: KvstoreSettings,
        clock: Clock,
        record: Callable[[WorkerInfo], Awaitable[None]],
    ) -> None:
        """`record` writes the worker's changed record to the metadata server."""
        self._port = port
        self._region = region
        self._settings = settings
        self._clock = clock
        self._record = record
        self.info = info
        #: None until the first put says what a block is; the layout is fixed from then on.
        self.cache: BlockCache | None = None
        #: Puts under way, for the events they will make, each until its reservation ends.
        self._puts: dict[tuple[PeerId, Ticket], _Put] = {}
        #: Where each conductor was last heard; they are told when `info` changes.
        self._conductors: dict[ConductorId, PeerId] = {}
        #: Sequence number of the last KV event published; -1 before the first.
        self._sequence = -1

    async def serve(self) -> None:
        """Answer commands until cancelled, or until a conductor won't have this worker.

        Raises:
            LayoutMismatch: a conductor refused this worker, with its reason.
        """
        async with asyncio.TaskGroup() as tasks:
            housekeeping = tasks.create_task(self._keep_house())
            try:
                while True:
                    peer, message = await self._port.receive()
                    await self._handle(peer, message)
            finally:
                housekeeping.cancel()

    async def _handle(self, peer: PeerId, message: Message) -> None:
        match message:
            case ReserveBlocks():
                await self._on_reserve(peer, message)
            case CommitBlocks():
                await self._on_commit(peer, message)
            case LeaseBlocks():
                await self._on_lease(peer, message)
            case RevokeBlocks(ticket=ticket):
                self._puts.pop((peer, ticket), None)
                if self.cache is not None:
                    self.cache.revoke(_owner(peer), ticket)
            case RenewLease(ticket=ticket):
                if self.cache is not None:
                    self.cache.renew(_owner(peer), ticket, self._clock.now())
            case ReleaseLease(ticket=ticket):
                if self.cache is not None:
                    self.cache.release(_owner(peer), ticket)
            case SnapshotBlocks():
                stored = () if self.cache is None else tuple(self.cache.hashes())
                await self._answer(peer, BlocksSnapshot(sequence=self._sequence, hashes=stored))
            case Hello(conductor_id=conductor):
                self._conductors[conductor] = peer
                await self._answer(peer, Welcome(worker=self.info))
            case Unwelcome(reason=reason):
                raise LayoutMismatch(reason)
            case Cancel():
                pass
            case _:
                log.warning("unexpected_message", message_type=type(message).__name__)

    async def _on_reserve(self, peer: PeerId, put: ReserveBlocks) -> None:
        try:
            cache = await self._cache_for(put)
            reserved = cache.reserve(
                _owner(peer), put.ticket, put.hashes, put.parent, self._clock.now()
            )
        except (LayoutMismatch, ValueError) as error:
            await self._answer(peer, KvstoreRefused(ticket=put.ticket, reason=str(error)))
            return
        except CacheFull as error:
            refusal = KvstoreRefused(
                ticket=put.ticket, reason=str(error), retry_after_s=error.retry_after_s
            )
            await self._answer(peer, refusal)
            return
        await self._announce_removed(reserved.evicted)
        deadline_s = self._clock.now() + self._settings.reservation_ttl_s
        self._puts[peer, put.ticket] = _Put(put, deadline_s)
        places = tuple(
            Place(block, slot * put.layout.block_bytes) for block, slot in reserved.places
        )
        await self._answer(
            peer,
            BlocksReserved(
                ticket=put.ticket,
                region=self._region,
                places=places,
                expires_s=self._settings.reservation_ttl_s,
            ),
        )

    async def _on_commit(self, peer: PeerId, commit: CommitBlocks) -> None:
        put = self._puts.pop((peer, commit.ticket), None)
        if put is None or self.cache is None:
            reason = f"ticket {commit.ticket} has no reservation here, or it ran out"
            await self._answer(peer, KvstoreRefused(ticket=commit.ticket, reason=reason))
            return
        try:
            stored = self.cache.commit(
                _owner(peer), commit.ticket, commit.checksums, self._clock.now()
            )
        except (UnknownTicket, ValueError) as error:
            await self._answer(peer, KvstoreRefused(ticket=commit.ticket, reason=str(error)))
            return
        if events := stored_events(put.reserved, stored):
            self._sequence = await self._port.publish_kv(events)
        await self._answer(peer, BlocksCommitted(ticket=commit.ticket))

    async def _on_lease(self, peer: PeerId, wanted: LeaseBlocks) -> None:
        places: tuple[Place, ...] = ()
        if self.cache is not None and self.info.layout is not None:
            try:
                self.info.layout.require_same(wanted.layout, self.info.worker_id, "the reader")
            except LayoutMismatch as error:
                await self._answer(peer, KvstoreRefused(ticket=wanted.ticket, reason=str(error)))
                return
            leased = self.cache.lease(_owner(peer), wanted.ticket, wanted.hashes, self._clock.now())
            size = self.info.layout.block_bytes
            places = tuple(Place(b.hash, b.slot * size, b.checksum) for b in leased)
        await self._answer(
            peer,
            BlocksLeased(
                ticket=wanted.ticket,
                region=self._region,
                places=places,
                expires_s=self._settings.lease_ttl_s,
            ),
        )

    async def _cache_for(self, put: ReserveBlocks) -> BlockCache:
        """The cache, made at the first put: only then is known how large a block is.

        Raises:
            LayoutMismatch: `put` is of another layout than the first one was.
            ValueError: the put contradicts itself, or not even one block fits.
        """
        layout = put.layout
        if len(put.token_ids) != len(put.hashes) * layout.block_size:
            raise ValueError(
                f"{len(put.token_ids)} token ids for {len(put.hashes)} blocks"
                f" of {layout.block_size}"
            )
        if self.cache is not None and self.info.layout is not None:
            self.info.layout.require_same(layout, self.info.worker_id, "the writer")
            return self.cache
        return await self._adopt(layout)

    async def _adopt(self, layout: KvLayout) -> BlockCache:
        n_slots = self._region.length // layout.block_bytes
        if n_slots == 0:
            raise ValueError(
                f"a block of {layout.block_bytes} bytes does not fit into the"
                f" {self._region.length} bytes of {self.info.worker_id}: raise its capacity"
            )
        self.cache = BlockCache(
            n_slots,
            policy=self._settings.eviction,
            high_watermark=self._settings.high_watermark,
            low_watermark=self._settings.low_watermark,
            reservation_ttl_s=self._settings.reservation_ttl_s,
            lease_ttl_s=self._settings.lease_ttl_s,
        )
        self.info = msgspec.structs.replace(self.info, layout=layout, n_blocks=n_slots)
        log.info("layout_adopted", n_blocks=n_slots, block_bytes=layout.block_bytes)
        for peer in self._conductors.values():
            await self._answer(peer, Welcome(worker=self.info))
        await self._record(self.info)
        return self.cache

    async def _keep_house(self) -> None:
        """Discard what ran out, evict ahead of demand, say how full it is."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if self.cache is None:
                continue
            now = self._clock.now()
            self.cache.expire(now)
            self._puts = {key: put for key, put in self._puts.items() if put.deadline_s > now}
            await self._announce_removed(self.cache.relieve(now))
            await self._port.publish(
                KvstoreLoad(
                    n_stored=self.cache.n_stored,
                    n_reserved=self.cache.n_reserved,
                    n_leased=self.cache.n_leased,
                    n_blocks=self.cache.n_slots,
                )
            )

    def readings(self) -> Readings:
        """What the metrics show."""
        if (cache := self.cache) is None:
            return {}
        return {
            "halfmoon_kvstore_blocks": (
                "Blocks by state; leased ones are stored too.",
                {"stored": cache.n_stored, "reserved": cache.n_reserved, "leased": cache.n_leased},
            ),
            "halfmoon_kvstore_capacity_blocks": ("Blocks that fit.", cache.n_slots),
        }

    async def _announce_removed(self, evicted: list[BlockHash]) -> None:
        if evicted:
            event = BlockRemoved(block_hashes=tuple(evicted), medium=MEDIUM)
            self._sequence = await self._port.publish_kv([event])

    async def _answer(self, peer: PeerId, message: Message) -> None:
        try:
            await self._port.send(peer, message)
        except PeerUnreachable:
            if self.cache is not None:
                self.cache.forget_owner(_owner(peer))
            self._puts = {key: put for key, put in self._puts.items() if key[0] != peer}
            self._conductors = {c: p for c, p in self._conductors.items() if p != peer}


def _owner(peer: PeerId) -> str:
    return peer.hex()
