"""Hold the blocks of a kvstore node, and carry out the decisions of its tiers.

`TieredCache` decides which block is in which tier. This shell owns the memory and the disk, and
runs the I/O of these decisions. Answers and events about them go to the outbox.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

import structlog

from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.disk_tier.slot_header import MAX_HASH_BYTES
from halfmoon_kvstore.kv_event_builder import moved_events
from halfmoon_kvstore.lease_spans import LeaseSpans
from halfmoon_kvstore.lent_keys import Holder, LentKeys, NoKeyLeft
from halfmoon_kvstore.outbox import Outbox
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksLeased,
    KvstoreRefused,
    Place,
    ReserveBlocks,
    WorkerInfo,
)
from halfmoon_protocol.regions import Region
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import Clock
from halfmoon_scheduling.cache.block_cache import BlockCache
from halfmoon_scheduling.cache.pins import Pins
from halfmoon_scheduling.cache.tenant_quotas import TenantQuotas
from halfmoon_scheduling.tiers.disk_map import DiskMap
from halfmoon_scheduling.tiers.tier_commands import (
    AnnounceBlocks,
    AnswerLease,
    Erase,
    Promote,
    WriteBack,
)
from halfmoon_scheduling.tiers.tier_limits import TierLimits
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from halfmoon_transfer.grant_lender import GrantLender, unkeyed
from halfmoon_transfer.regions.region_table import Memory

log = structlog.get_logger()

#: Called once with the layout, and with the number of blocks that fit into memory.
OnLayoutAdopted = Callable[[KvLayout, int], Awaitable[None]]
#: Returns a worker whose record states the layout of the cluster's KV, if one is known.
ModelWorkerLookup = Callable[[], Awaitable[WorkerInfo | None]]
#: Most blocks in memory, and smallest block in bytes: each costs some of the process's memory.
MAX_BLOCKS = 2**24
MIN_BLOCK_BYTES = 512
#: Seconds between two looks for room on a file system that had too little for the disk's files.
_LOOK_FOR_ROOM_S = 30.0


class BlockStore:
    """Own the memory, the disk if there is one, and the tiers that decide over them."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        settings: KvstoreSettings,
        clock: Clock,
        outbox: Outbox,
        adopted: OnLayoutAdopted,
        disk: SegmentFolder | None = None,
        traces: LeaseSpans | None = None,
        model: ModelWorkerLookup | None = None,
        lender: GrantLender[Holder] | None = None,
    ) -> None:
        """Start empty; `restore` reads the disk.

        Args:
            name: name of the node, for refusals.
            memory: registered memory for blocks.
            settings: settings of the node.
            clock: tells the time.
            outbox: sends answers to leases, and events.
            adopted: called with the layout, once it is known.
            disk: holds blocks that leave memory; None: they are dropped.
            traces: records answers to leases.
            model: finds a worker whose layout the first put must have; None: the first put may
                have any layout.
            lender: lends keys of the memory; None: leases and puts get the memory's own.
        """
        self._model = model
        self.name = name
        self.memory = memory
        self.region = memory.region
        self.keys = LentKeys(memory.region, lender)
        self.disk = disk
        self._settings = settings
        self._clock = clock
        self._outbox = outbox
        self._adopted = adopted
        self._traces = traces or LeaseSpans()
        self.limits = TierLimits(
            promotion_wait_s=settings.promotion_wait_s, read_ahead=settings.read_ahead
        )
        #: None until the first put, or the disk, determines the layout of blocks. Fixed from
        #: then on, as is `layout`.
        self.tiers: TieredCache | None = None
        self.layout: KvLayout | None = None
        #: Held while the disk is opened for a layout.
        self._adopting = asyncio.Lock()
        #: When the file system is looked at again for room that it lacked; infinite: it is now.
        self._look_for_room_at_s = 0.0
        #: Set when the last pending write has ended.
        self._all_saved = asyncio.Event()
        #: Parent of all I/O tasks, while the node serves.
        self._tasks: asyncio.TaskGroup | None = None
        self._threads = ThreadPoolExecutor(
            self.limits.max_writing + self.limits.max_promoting, thread_name_prefix="disk"
        )

    def start_in(self, tasks: asyncio.TaskGroup) -> None:
        """Use this group as the parent of all I/O tasks."""
        self._tasks = tasks

    async def close(self) -> None:
        """Wait for I/O: its threads can't be cancelled, and use memory and files closed next."""
        await asyncio.to_thread(self._threads.shutdown)

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that fit without evicting others; 0 before the layout is known."""
        if self.tiers is None or self.layout is None:
            return self.region.length
        return self.tiers.n_room * self.layout.block_bytes

    # -- beginning ---------------------------------------------------------------------------

    async def restore(self) -> None:
        """Load the blocks that an earlier start left on the disk."""
        if self.disk is not None and (layout := self.disk.layout()) is not None:
            try:
                await self._adopt(layout)
                await self._require_the_models(layout)
            except LayoutMismatch as error:
                log.error("blocks_of_another_layout", reason=f"{error}{self.layout_hint()}")
            except ValueError as error:
                log.warning("disk_not_used", reason=str(error))

    async def tiers_for(self, put: ReserveBlocks, *, tokens_unknown: bool = False) -> TieredCache:
        """Return the tiers; the first put makes them, as it states the size of a block.

        Raises:
            LayoutMismatch: the layout of `put` differs from that of the first put. For the first
                put: it differs from the KV of the cluster's workers.
            ValueError: the put contradicts itself, or not one block fits.
        """
        layout = put.layout
        if len(put.token_ids) != len(put.hashes) * layout.block_size and not tokens_unknown:
            raise ValueError(
                f"{len(put.token_ids)} token ids for {len(put.hashes)} blocks"
                f" of {layout.block_size}"
            )
        if len(set(put.hashes)) < len(put.hashes) or put.parent in put.hashes:
            raise ValueError("a block is named twice: each is the child of the one before")
        longest = max((len(block) for block in (*put.hashes, put.parent or b"")), default=0)
        if longest > MAX_HASH_BYTES:
            raise ValueError(f"a block hash of {longest} bytes, at most {MAX_HASH_BYTES} are kept")
        if self.tiers is not None and self.layout is not None:
            try:
                self.layout.require_same(layout, self.name, "the writer")
            except LayoutMismatch as error:
                raise LayoutMismatch(f"{error}{self.layout_hint()}") from None
            return self.tiers
        async with self._adopting:
            if self.tiers is None:
                await self._require_the_models(layout)
                return await self._adopt(layout)
        return await self.tiers_for(put, tokens_unknown=tokens_unknown)  # another put was first

    async def _require_the_models(self, layout: KvLayout) -> None:
        """Refuse a layout that is not the model's, which this node could then never store.

        Raises:
            LayoutMismatch: the layouts differ; the text has the values of both.
        """
        worker = None if self._model is None else await self._model()
        if worker is None or worker.layout is None:
            return
        try:
            worker.layout.require_same(layout, worker.worker_id, f"the first put to {self.name}")
        except LayoutMismatch as error:
            raise LayoutMismatch(
                f"{error}; {self.name} keeps KV of the model that the cluster serves, in blocks of"
                f" {worker.layout.block_bytes} bytes"
            ) from None

    async def _adopt(self, layout: KvLayout) -> TieredCache:
        n_slots = self.region.length // layout.block_bytes
        if layout.block_bytes < MIN_BLOCK_BYTES or n_slots > MAX_BLOCKS:
            raise ValueError(
                f"blocks of {layout.block_bytes} bytes, of which {n_slots} would fit into"
                f" {self.name}: at least {MIN_BLOCK_BYTES} bytes, at most {MAX_BLOCKS} blocks"
            )
        if n_slots == 0:
            raise ValueError(
                f"a block of {layout.block_bytes} bytes does not fit into the"
                f" {self.region.length} bytes of {self.name}: raise its capacity"
            )
        settings = self._settings
        memory = BlockCache(
            n_slots,
            policy=settings.eviction,
            high_watermark=settings.high_watermark,
            low_watermark=settings.low_watermark,
            reservation_ttl_s=settings.reservation_ttl_s,
            lease_ttl_s=settings.lease_ttl_s,
            pins=Pins(max_held=int(settings.hard_pin_share * n_slots)),
        )
        if self.disk is not None:
            await asyncio.to_thread(self.disk.open, layout)
        n_disk_slots = 0 if self.disk is None else self.disk.n_slots
        quotas = TenantQuotas(
            {
                tenant: n_bytes // layout.block_bytes
                for tenant, n_bytes in settings.tenant_quotas_bytes.items()
            }
        )
        disk_map = DiskMap(n_disk_slots, policy=settings.eviction)
        tiers = TieredCache(memory, disk_map, self.limits, quotas)
        if self.disk is not None:
            await asyncio.to_thread(lambda disk: tiers.restore(disk.blocks()), self.disk)
        self.keys.follow(memory, layout.block_bytes)
        self.tiers, self.layout = tiers, layout
        log.info(
            "layout_adopted",
            n_blocks=n_slots,
            block_bytes=layout.block_bytes,
            n_disk_blocks=n_disk_slots,
            n_found=len(tiers.disk),
            direct=self.disk is not None and self.disk.direct,
        )
        await self._adopted(layout, n_slots)
        return self.tiers

    def look_for_room(self) -> None:
        """Make more files in a thread, from time to time, while the disk is smaller than wanted."""
        now = self._clock.now()
        if self.tiers is None or self.missing_disk_bytes == 0 or now < self._look_for_room_at_s:
            return
        assert self._tasks is not None, "room is looked for outside of serve"
        self._look_for_room_at_s = math.inf
        self._tasks.create_task(self._grow_disk(self.tiers))

    async def _grow_disk(self, tiers: TieredCache) -> None:
        assert self.disk is not None, "there is no disk to grow"
        loop = asyncio.get_running_loop()
        if n_slots := await loop.run_in_executor(self._threads, self.disk.grow):
            tiers.grow_disk(n_slots)
        self._look_for_room_at_s = self._clock.now() + _LOOK_FOR_ROOM_S

    @property
    def missing_disk_bytes(self) -> int:
        """Bytes of the disk's files for which the file system has had no room yet."""
        return 0 if self.disk is None else self.disk.missing_bytes

    def layout_hint(self) -> str:
        """Return the advice that ends an error text about layouts."""
        if self.disk is None:
            return ""
        return f"; blocks of an earlier layout are in {self.disk.path}: remove it to start anew"

    # -- what the tiers want done ------------------------------------------------------------

    def run_commands(self) -> None:
        """Start the I/O that the tiers ordered, and queue their answers and events."""
        if self.tiers is None:
            return
        assert self.layout is not None, "there are tiers without a layout"
        size = self.layout.block_bytes
        for command in self.tiers.commands():
            match command:
                case AnswerLease(owner=owner, ticket=ticket, places=found, n_from_disk=n_from_disk):
                    # It may have ended since: then the answer has no blocks.
                    held = found if self.tiers.memory.holds(owner, ticket) else ()
                    try:
                        region = self.keys.lend_to_read(
                            (owner, ticket), [b.slot for b in held], self._settings.lease_ttl_s
                        )
                    except NoKeyLeft as error:
                        self.tiers.memory.release(owner, ticket)
                        self._refuse_lease(peer_of(owner), ticket, str(error))
                        continue
                    places = tuple([Place(b.hash, b.slot * size, b.checksum) for b in held])
                    self.answer_lease(peer_of(owner), ticket, places, n_from_disk, region)
                case AnnounceBlocks():
                    self._outbox.publish(moved_events(command, self.layout.block_size))
                case WriteBack() | Promote():
                    start = command.memory_slot * size
                    self._start(self.tiers, command, self.memory.view[start : start + size])
                case Erase():
                    self._start(self.tiers, command, memoryview(b""))
                case _:
                    raise AssertionError(f"an unknown command: {command}")

    def answer_lease(
        self,
        peer: PeerId,
        ticket: Ticket,
        places: tuple[Place, ...] = (),
        n_from_disk: int = 0,
        region: Region | None = None,
    ) -> None:
        """Answer a lease with the places that it holds, in a region with its key."""
        leased = BlocksLeased(
            ticket=ticket,
            region=unkeyed(self.region) if region is None else region,
            places=places,
            expires_s=self._settings.lease_ttl_s,
            n_from_disk=n_from_disk,
        )
        self._outbox.answer(peer, leased)
        self._traces.on_answered(peer, leased, self._clock.now())

    def _refuse_lease(self, peer: PeerId, ticket: Ticket, reason: str) -> None:
        retry_after_s = self._settings.lease_ttl_s
        refused = KvstoreRefused(
            ticket=ticket,
            reason=reason,
            retry_after_s=retry_after_s,
            code=error_codes.NO_ROOM,
        )
        self._outbox.answer(peer, refused)
        self._traces.on_refused(peer, ticket, reason, self._clock.now())

    async def write_back_all(self, limit_s: float) -> None:
        """Write blocks that only memory holds to the disk, for at most `limit_s` seconds."""
        if (tiers := self.tiers) is None:
            return
        self._all_saved.clear()
        tiers.save_all(self._clock.now())
        self.run_commands()
        log.info("saving", n_blocks=tiers.n_to_save)
        try:
            async with asyncio.timeout(limit_s):
                if tiers.n_to_save:
                    await self._all_saved.wait()
        except TimeoutError:
            log.warning("blocks_not_saved", n_blocks=tiers.n_to_save, after_s=limit_s)

    def _start(
        self, tiers: TieredCache, command: WriteBack | Promote | Erase, view: memoryview
    ) -> None:
        assert self._tasks is not None, "I/O is wanted outside of serve"
        self._tasks.create_task(self._carry(tiers, command, view))

    async def _carry(
        self, tiers: TieredCache, command: WriteBack | Promote | Erase, view: memoryview
    ) -> None:
        """Do I/O in a thread, and give its outcome to the tiers as an event."""
        assert self.disk is not None, "I/O is wanted without a disk"
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._threads, self.disk.perform, command, view)
        now = self._clock.now()
        match command:
            case WriteBack(record=record):
                tiers.on_written(record.hash, outcome, now)
            case Promote(record=record):
                tiers.on_promoted(record.hash, outcome, now)
            case Erase(disk_slot=slot):
                tiers.on_erased(slot)
            case _:
                assert_never(command)
        self.run_commands()
        if not tiers.n_to_save:
            self._all_saved.set()
        await self._outbox.send()


def owner_of(peer: PeerId) -> str:
    """Return the tiers' name of a caller."""
    return peer.hex()


def peer_of(owner: str) -> PeerId:
    """Return the caller with this name at the tiers."""
    return PeerId(bytes.fromhex(owner))
