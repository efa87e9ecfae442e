"""The kvstore at work: commands in, answers and KV events out.

`TieredCache` decides what is where; this shell owns the memory, the disk, the port and the
clock. It is the only authority over its own blocks: what conductors know of them they know from
its events.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import assert_never

import msgspec
import structlog

from halfmoon_kvstore.copier import Copier
from halfmoon_kvstore.disk import Disk
from halfmoon_kvstore.journal import moved_events, stored_events
from halfmoon_kvstore.outbox import Outbox
from halfmoon_kvstore.readings import readings
from halfmoon_kvstore.segment import MAX_HASH_BYTES
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import ConductorId, Ticket
from halfmoon_protocol.layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksCommitted,
    BlocksLeased,
    BlocksReplicated,
    BlocksReserved,
    BlocksSnapshot,
    Cancel,
    CommitBlocks,
    DropBlocks,
    Hello,
    KvstoreLoad,
    KvstoreRefused,
    LeaseBlocks,
    Message,
    Place,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    Unwelcome,
    Welcome,
    WorkerInfo,
)
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.gauges import Readings
from halfmoon_runtime.kvstores import KvstoreUnavailable
from halfmoon_runtime.network import PeerId, Port
from halfmoon_scheduling.block_cache import BlockCache, CacheError, CacheFull
from halfmoon_scheduling.disk_map import DiskMap
from halfmoon_scheduling.tier_commands import Announce, Answer, Erase, Promote, WriteBack
from halfmoon_scheduling.tiers import TieredCache, TierLimits
from halfmoon_transfer.interface import TransferError
from halfmoon_transfer.regions import Memory

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.25
#: The owner of reservations for copies from other kvstores; no client has this name.
_COPIES = "copies"
_FOREVER_S = float("inf")
#: Seconds that a conductor waits when a copy is under way already.
_COPY_RETRY_S = 1.0


@dataclass(frozen=True)
class _Put:
    """A put under way, and until when."""

    reserved: ReserveBlocks
    deadline_s: float


class KvstoreWorker:
    """Serves one port from one region of memory, and a disk if there is one."""

    def __init__(
        self,
        port: Port,
        memory: Memory,
        info: WorkerInfo,
        settings: KvstoreSettings,
        clock: Clock,
        record: Callable[[WorkerInfo], Awaitable[None]],
        disk: Disk | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Serve nothing yet.

        Args:
            port: where commands come from and events go.
            memory: for blocks.
            info: the worker's record, without a layout.
            settings: its settings.
            clock: what time it is.
            record: writes the worker's changed record to the metadata server.
            disk: for blocks that leave memory; None: they are dropped.
            copier: gets blocks of other kvstores; None: none are copied.
        """
        self._port = port
        self._memory = memory
        self._region = memory.region
        self._settings = settings
        self._clock = clock
        self._record = record
        self._disk = disk
        self._copier = copier
        self.info = info
        self.limits = TierLimits(
            promotion_wait_s=settings.promotion_wait_s, read_ahead=settings.read_ahead
        )
        #: None until the first put (or what is on the disk) says what a block is; the layout is
        #: fixed from then on.
        self.tiers: TieredCache | None = None
        #: Puts under way, for the events they will make, each until its reservation ends.
        self._puts: dict[tuple[PeerId, Ticket], _Put] = {}
        #: Where each conductor was last heard; they are told when `info` changes.
        self._conductors: dict[ConductorId, PeerId] = {}
        self._outbox = Outbox(port, self._on_lost)
        #: Set when a write has ended and none is left to do.
        self._all_saved = asyncio.Event()
        #: Parent of all I/O, while `serve` runs.
        self._tasks: asyncio.TaskGroup | None = None
        self._threads = ThreadPoolExecutor(
            self.limits.max_writing + self.limits.max_promoting, thread_name_prefix="disk"
        )

    async def serve(self) -> None:
        """Answer commands until cancelled, or until a conductor won't have this worker.

        Raises:
            LayoutMismatch: a conductor refused this worker, with its reason.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                await self._remember()
                housekeeping = self._tasks.create_task(self._keep_house())
                try:
                    while True:
                        peer, message = await self._port.receive()
                        await self._handle(peer, message)
                        await self._outbox.send()
                finally:
                    housekeeping.cancel()
        finally:
            # Threads can't be cancelled, and use memory and files that are closed next.
            await asyncio.to_thread(self._threads.shutdown)

    async def drain(self) -> None:
        """Take no more puts, and save on the disk what only memory has: the node is to stop."""
        self.info = msgspec.structs.replace(self.info, draining=True)
        for peer in self._conductors.values():
            self._outbox.answer(peer, Welcome(worker=self.info))
        await self._record(self.info)
        await self._outbox.send()
        if (tiers := self.tiers) is None:
            return
        self._all_saved.clear()
        tiers.save_all(self._clock.now())
        self._heed(tiers)
        log.info("draining", n_blocks=tiers.n_to_save)
        try:
            async with asyncio.timeout(self._settings.drain_s):
                if tiers.n_to_save:
                    await self._all_saved.wait()
        except TimeoutError:
            log.warning(
                "blocks_not_saved", n_blocks=tiers.n_to_save, after_s=self._settings.drain_s
            )

    async def _handle(self, peer: PeerId, message: Message) -> None:
        match message:
            case ReserveBlocks():
                await self._on_reserve(peer, message)
            case CommitBlocks():
                self._on_commit(peer, message)
            case LeaseBlocks():
                self._on_lease(peer, message)
            case RevokeBlocks(ticket=ticket):
                self._puts.pop((peer, ticket), None)
                if self.tiers is not None:
                    self.tiers.revoke(_owner(peer), ticket)
            case RenewLease(ticket=ticket):
                if self.tiers is not None:
                    self.tiers.renew(_owner(peer), ticket, self._clock.now())
            case ReleaseLease(ticket=ticket):
                if self.tiers is not None:
                    self.tiers.release(_owner(peer), ticket, self._clock.now())
                    self._heed(self.tiers)
            case ReplicateBlocks():
                self._on_replicate(peer, message)
            case DropBlocks(hashes=hashes):
                if self.tiers is not None:
                    self.tiers.drop(hashes, self._clock.now())
                    self._heed(self.tiers)
            case SnapshotBlocks():
                # Events of what has changed since may follow: to hear of it twice does no harm.
                stored = () if self.tiers is None else tuple(self.tiers.hashes())
                snapshot = BlocksSnapshot(sequence=self._outbox.sequence, hashes=stored)
                self._outbox.answer(peer, snapshot)
            case Hello(conductor_id=conductor):
                self._conductors[conductor] = peer
                self._outbox.answer(peer, Welcome(worker=self.info))
            case Unwelcome(reason=reason):
                raise LayoutMismatch(reason + self._how_to_start_anew())
            case Cancel():
                pass
            case _:
                log.warning("unexpected_message", message_type=type(message).__name__)

    # -- commands ----------------------------------------------------------------------------

    async def _on_reserve(self, peer: PeerId, put: ReserveBlocks) -> None:
        if self.info.draining:
            self._refuse(peer, put.ticket, f"{self.info.worker_id} is stopping: use another one")
            return
        try:
            tiers = await self._tiers_for(put)
        except (LayoutMismatch, ValueError) as error:
            self._refuse(peer, put.ticket, str(error))
            return
        now = self._clock.now()
        try:
            reserved = tiers.reserve(_owner(peer), put.ticket, put.hashes, put.parent, now)
        except CacheFull as error:
            self._refuse(peer, put.ticket, str(error), error.retry_after_s)
        except CacheError as error:
            self._refuse(peer, put.ticket, str(error))
        else:
            self._puts[peer, put.ticket] = _Put(put, now + self._settings.reservation_ttl_s)
            answer = BlocksReserved(
                ticket=put.ticket,
                region=self._region,
                places=tuple(
                    Place(block, slot * put.layout.block_bytes) for block, slot in reserved.places
                ),
                expires_s=self._settings.reservation_ttl_s,
            )
            self._outbox.answer(peer, answer)
        self._heed(tiers)

    def _on_commit(self, peer: PeerId, commit: CommitBlocks) -> None:
        put = self._puts.pop((peer, commit.ticket), None)
        if put is None or self.tiers is None:
            reason = f"ticket {commit.ticket} has no reservation here, or it ran out"
            self._refuse(peer, commit.ticket, reason)
            return
        try:
            stored = self.tiers.commit(
                _owner(peer), commit.ticket, commit.checksums, self._clock.now()
            )
        except (CacheError, ValueError) as error:
            self._refuse(peer, commit.ticket, str(error))
            return
        self._outbox.tell(stored_events(put.reserved, stored))
        self._outbox.answer(peer, BlocksCommitted(ticket=commit.ticket))
        self._heed(self.tiers)

    def _on_lease(self, peer: PeerId, wanted: LeaseBlocks) -> None:
        if self.tiers is None or self.info.layout is None:
            self._outbox.answer(peer, self._leased(wanted.ticket, ()))
            return
        try:
            self.info.layout.require_same(wanted.layout, self.info.worker_id, "the reader")
            self.tiers.lease(_owner(peer), wanted.ticket, wanted.hashes, self._clock.now())
        except (LayoutMismatch, CacheError) as error:
            self._refuse(peer, wanted.ticket, str(error))
        self._heed(self.tiers)

    def _on_replicate(self, peer: PeerId, order: ReplicateBlocks) -> None:
        if self._copier is None or self._tasks is None or self.info.draining:
            self._refuse(peer, order.ticket, f"{self.info.worker_id} copies no blocks")
        elif self._copier.busy:
            reason = f"{self.info.worker_id} copies other blocks just now"
            self._refuse(peer, order.ticket, reason, _COPY_RETRY_S)
        else:
            self._tasks.create_task(self._replicate(self._copier, peer, order))

    async def _replicate(self, copier: Copier, peer: PeerId, order: ReplicateBlocks) -> None:
        """Lease at the source, reserve here, read, verify, serve; or say why not."""
        try:
            async with copier.leased(order) as lease:
                n_blocks = await self._copy(copier, order, lease)
        except CacheFull as error:
            self._refuse(peer, order.ticket, str(error), error.retry_after_s)
        except (KvstoreUnavailable, TransferError, LayoutMismatch, CacheError, ValueError) as error:
            self._refuse(peer, order.ticket, str(error))
        else:
            done = BlocksReplicated(ticket=order.ticket, n_blocks=n_blocks)
            self._outbox.answer(peer, done)
        await self._outbox.send()

    async def _copy(self, copier: Copier, order: ReplicateBlocks, lease: BlocksLeased) -> int:
        """Copy what is leased; how many blocks of the order are here then, from its first."""
        size, n = order.layout.block_bytes, len(lease.places)
        put = ReserveBlocks(
            ticket=order.ticket,
            layout=order.layout,
            hashes=order.hashes[:n],
            parent=order.parent,
            token_ids=order.token_ids[: n * order.layout.block_size],
        )
        tiers = await self._tiers_for(put)
        # It ends with the read, however long that takes: until then bytes come in.
        reserved = tiers.reserve(
            _COPIES, put.ticket, put.hashes, put.parent, self._clock.now(), ttl_s=_FOREVER_S
        )
        self._heed(tiers)
        try:
            places = {place.hash: place for place in lease.places}
            wanted = [(places[block], slot * size) for block, slot in reserved.places]
            checksums = await copier.read(lease, wanted, size) if wanted else []
        except BaseException:
            tiers.revoke(_COPIES, put.ticket)
            raise
        stored = tiers.commit(_COPIES, put.ticket, checksums, self._clock.now())
        self._outbox.tell(stored_events(put, stored))
        self._heed(tiers)
        missing = (i for i, block in enumerate(put.hashes) if block not in tiers)
        return next(missing, len(put.hashes))

    def _leased(self, ticket: Ticket, places: tuple[Place, ...]) -> BlocksLeased:
        return BlocksLeased(
            ticket=ticket,
            region=self._region,
            places=places,
            expires_s=self._settings.lease_ttl_s,
        )

    def _refuse(
        self, peer: PeerId, ticket: Ticket, reason: str, retry_after_s: float = 0.0
    ) -> None:
        self._outbox.answer(
            peer, KvstoreRefused(ticket=ticket, reason=reason, retry_after_s=retry_after_s)
        )

    def _on_lost(self, peer: PeerId) -> None:
        """A caller is gone: what it holds is let go."""
        if self.tiers is not None:
            self.tiers.forget_owner(_owner(peer))
        self._puts = {key: put for key, put in self._puts.items() if key[0] != peer}
        self._conductors = {c: p for c, p in self._conductors.items() if p != peer}

    # -- what the tiers want done ------------------------------------------------------------

    def _heed(self, tiers: TieredCache) -> None:
        """Start what they want done; what they say goes to the outbox."""
        assert self.info.layout is not None, "there are tiers without a layout"
        size = self.info.layout.block_bytes
        for command in tiers.commands():
            match command:
                case Answer(owner=owner, ticket=ticket, places=found):
                    places = tuple(Place(b.hash, b.slot * size, b.checksum) for b in found)
                    peer = PeerId(bytes.fromhex(owner))
                    self._outbox.answer(peer, self._leased(ticket, places))
                case Announce():
                    self._outbox.tell(moved_events(command, self.info.layout.block_size))
                case WriteBack() | Promote():
                    start = command.memory_slot * size
                    self._start(tiers, command, self._memory.view[start : start + size])
                case Erase():
                    self._start(tiers, command, memoryview(b""))
                case _:
                    raise AssertionError(f"a command that nobody does: {command}")

    def _start(
        self, tiers: TieredCache, command: WriteBack | Promote | Erase, view: memoryview
    ) -> None:
        assert self._tasks is not None, "I/O is wanted outside of serve"
        self._tasks.create_task(self._carry(tiers, command, view))

    async def _carry(
        self, tiers: TieredCache, command: WriteBack | Promote | Erase, view: memoryview
    ) -> None:
        """Do I/O in a thread; how it went is an event for the tiers."""
        assert self._disk is not None, "I/O is wanted without a disk"
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._threads, self._disk.perform, command, view)
        now = self._clock.now()
        match command:
            case WriteBack(record=record):
                tiers.written(record.hash, outcome, now)
            case Promote(record=record):
                tiers.promoted(record.hash, outcome, now)
            case Erase(disk_slot=slot):
                tiers.erased(slot)
            case _:
                assert_never(command)
        self._heed(tiers)
        if not tiers.n_to_save:
            self._all_saved.set()
        await self._outbox.send()

    # -- beginning ---------------------------------------------------------------------------

    async def _remember(self) -> None:
        """Serve what an earlier start left on the disk."""
        if self._disk is not None and (layout := self._disk.layout()) is not None:
            try:
                await self._adopt(layout)
            except ValueError as error:
                log.warning("disk_not_used", reason=str(error))

    async def _tiers_for(self, put: ReserveBlocks) -> TieredCache:
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
        longest = max((len(block) for block in (*put.hashes, put.parent or b"")), default=0)
        if longest > MAX_HASH_BYTES:
            raise ValueError(f"a block hash of {longest} bytes, at most {MAX_HASH_BYTES} are kept")
        if self.tiers is not None and self.info.layout is not None:
            try:
                self.info.layout.require_same(layout, self.info.worker_id, "the writer")
            except LayoutMismatch as error:
                raise LayoutMismatch(f"{error}{self._how_to_start_anew()}") from None
            return self.tiers
        return await self._adopt(layout)

    async def _adopt(self, layout: KvLayout) -> TieredCache:
        n_slots = self._region.length // layout.block_bytes
        if n_slots == 0:
            raise ValueError(
                f"a block of {layout.block_bytes} bytes does not fit into the"
                f" {self._region.length} bytes of {self.info.worker_id}: raise its capacity"
            )
        settings = self._settings
        memory = BlockCache(
            n_slots,
            policy=settings.eviction,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
            reservation_ttl_s=settings.reservation_ttl_s,
            lease_ttl_s=settings.lease_ttl_s,
        )
        found = [] if self._disk is None else await asyncio.to_thread(self._disk.open, layout)
        n_disk_slots = 0 if self._disk is None else self._disk.n_slots
        self.tiers = TieredCache(
            memory, DiskMap(n_disk_slots, policy=settings.eviction), self.limits
        )
        self.tiers.restore(found)
        self.info = msgspec.structs.replace(self.info, layout=layout, n_blocks=n_slots)
        log.info(
            "layout_adopted",
            n_blocks=n_slots,
            block_bytes=layout.block_bytes,
            n_disk_blocks=n_disk_slots,
            n_found=len(found),
            direct=self._disk is not None and self._disk.direct,
        )
        for peer in self._conductors.values():
            self._outbox.answer(peer, Welcome(worker=self.info))
        await self._record(self.info)
        return self.tiers

    def _how_to_start_anew(self) -> str:
        if self._disk is None:
            return ""
        return f"; blocks of an earlier layout are in {self._disk.path}: remove it to start anew"

    async def _keep_house(self) -> None:
        """Discard what ran out, evict ahead of demand, say how full it is."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if (tiers := self.tiers) is None:
                continue
            now = self._clock.now()
            self._puts = {key: put for key, put in self._puts.items() if put.deadline_s > now}
            tiers.tick(now)
            self._heed(tiers)
            await self._outbox.send()
            await self._port.publish(
                KvstoreLoad(
                    n_stored=tiers.memory.n_stored,
                    n_reserved=tiers.memory.n_reserved,
                    n_leased=tiers.memory.n_leased,
                    n_blocks=tiers.memory.n_slots,
                )
            )

    def readings(self) -> Readings:
        """What the metrics show."""
        return {} if self.tiers is None else readings(self.tiers)


def _owner(peer: PeerId) -> str:
    return peer.hex()
