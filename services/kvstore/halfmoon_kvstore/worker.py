"""Handle the commands of a kvstore node: answer callers, and publish KV events.

`BlockStore` holds the blocks; this shell has the port and the clock. A node is the only authority
over its blocks: conductors know of them only by its events.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec
import structlog

from halfmoon_kvstore.block_store import BlockStore, ModelWorkerLookup, owner_of
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.kv_event_builder import kept_for_events, stored_events
from halfmoon_kvstore.lease_spans import LeaseSpans
from halfmoon_kvstore.lent_keys import Holder, NoKeyLeft
from halfmoon_kvstore.metrics import kvstore_metrics, load_message
from halfmoon_kvstore.outbox import Outbox
from halfmoon_kvstore.refusal_codes import code_of
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.replication.replication_handler import ReplicationHandler
from halfmoon_kvstore.scrubber import BlockScrubber
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import ConductorId, Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    AnyMessage,
    BlocksCommitted,
    BlocksReserved,
    Cancel,
    CommitBlocks,
    DropBlocks,
    Hello,
    KvstoreRefused,
    LeaseBlocks,
    LeaseRenewed,
    Place,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    ToKvstore,
    Unwelcome,
    VerifyBlocks,
    Welcome,
    WorkerInfo,
)
from halfmoon_protocol.snapshots import snapshot_pages
from halfmoon_protocol.versions import version_fault, wrong_version
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.message_loop import drop_unexpected, serve_messages
from halfmoon_scheduling.cache.block_cache import CacheError, CacheFull
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.regions.region_table import Memory

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.25
#: Longest text of a peer in the log, in characters.
_MAX_LOGGED = 1000


@dataclass(frozen=True)
class _Put:
    """A pending put, and its deadline."""

    reserved: ReserveBlocks
    deadline_s: float


class KvstoreWorker:
    """Serve one port from one region of memory, and from a disk if there is one."""

    def __init__(
        self,
        port: Port,
        memory: Memory,
        info: WorkerInfo,
        settings: KvstoreSettings,
        clock: Clock,
        record: Callable[[WorkerInfo], Awaitable[None]],
        disk: SegmentFolder | None = None,
        replica_reader: ReplicaReader | None = None,
        tracer: Tracer | None = None,
        model: ModelWorkerLookup | None = None,
        lender: GrantLender[Holder] | None = None,
    ) -> None:
        """Prepare the node; `serve` starts it.

        Args:
            port: receives commands, sends answers and events.
            memory: registered memory for blocks.
            info: the worker's record, without a layout.
            settings: settings of the node.
            clock: tells the time.
            record: writes the worker's changed record to the metadata server.
            disk: holds blocks that leave memory; None: they are dropped.
            replica_reader: reads blocks of other kvstores; None: copy orders are refused.
            tracer: makes spans; None: no traces.
            model: finds a worker whose KV this node stores; None: it is unknown.
            lender: lends keys of the memory; None: leases and puts get the memory's own.
        """
        self._port = port
        self._settings = settings
        self._clock = clock
        self._record = record
        self.info = info
        #: Pending puts, for their events; each until its reservation ends.
        self._puts: dict[tuple[PeerId, Ticket], _Put] = {}
        #: Connections that sent a hello, with their names; they get each change of `info`.
        self._conductors: dict[PeerId, ConductorId] = {}
        self._outbox = Outbox(port, self._on_lost)
        self._traces = LeaseSpans(tracer)
        self.block_store = BlockStore(
            info.worker_id,
            memory,
            settings,
            clock,
            self._outbox,
            self._on_adopted,
            disk,
            self._traces,
            model,
            lender,
        )
        self._scrubber = BlockScrubber(self.block_store, clock)
        self._replication = (
            None
            if replica_reader is None
            else ReplicationHandler(
                replica_reader,
                self.block_store,
                self._outbox,
                clock,
                event_tokens=settings.event_tokens,
            )
        )
        #: Parent of all background tasks, while `serve` runs.
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def tiers(self) -> TieredCache | None:
        """The tiers; None until the first put, or the disk, determines the layout."""
        return self.block_store.tiers

    @property
    def n_conductors(self) -> int:
        """Conductors that are connected to this node."""
        return len(self._conductors)

    async def serve(self) -> None:
        """Answer commands until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self.block_store.start_in(self._tasks)
                await self.block_store.restore()
                housekeeping = self._tasks.create_task(self._housekeep())
                try:
                    await serve_messages(self._port, self._handle_and_answer)
                finally:
                    housekeeping.cancel()
        finally:
            await self.block_store.close()

    async def stop_accepting(self) -> None:
        """Refuse puts and copies from now on, before the node leaves."""
        await self._change_info(msgspec.structs.replace(self.info, draining=True))
        await self._outbox.send()

    async def _on_adopted(self, layout: KvLayout, n_blocks: int) -> None:
        await self._change_info(
            msgspec.structs.replace(self.info, layout=layout, n_blocks=n_blocks)
        )

    async def _change_info(self, info: WorkerInfo) -> None:
        """Send the node's changed record to conductors and to the metadata server."""
        self.info = info
        for peer in self._conductors:
            self._outbox.answer(peer, Welcome(worker=info))
        await self._record(info)

    async def _handle_and_answer(self, peer: PeerId, message: AnyMessage) -> None:
        try:
            await self._handle(peer, message)
        finally:
            await self._outbox.send()

    async def _handle(self, peer: PeerId, message: AnyMessage) -> None:
        if isinstance(message, ToKvstore):
            await self._on_message(peer, message)
        else:
            drop_unexpected(self._port, message)

    async def _on_message(self, peer: PeerId, message: ToKvstore) -> None:
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
                    self.tiers.revoke(owner_of(peer), ticket)
            case RenewLease(ticket=ticket):
                self._on_renew(peer, ticket)
            case ReleaseLease(ticket=ticket):
                self._traces.on_given_up(peer, ticket, self._clock.now())
                if self.tiers is not None:
                    self.tiers.release(owner_of(peer), ticket, self._clock.now())
                    self.block_store.run_commands()
            case ReplicateBlocks():
                self._on_replicate(peer, message)
            case DropBlocks(hashes=hashes):
                if self.tiers is not None:
                    self.tiers.drop(hashes, self._clock.now())
                    self.block_store.run_commands()
            case VerifyBlocks(hashes=hashes):
                self._scrubber.add(hashes)
            case SnapshotBlocks():
                # Events of later changes may follow; applying a change twice does no harm.
                stored = () if self.tiers is None else self.tiers.hashes()
                sequence, room = self._outbox.sequence, self.block_store.free_bytes
                for page in snapshot_pages(message, sequence, stored, room):
                    self._outbox.answer(peer, page)
            case Hello():
                self._on_hello(peer, message)
            case Unwelcome(reason=reason):
                # The node also holds objects and blocks of other conductors: it goes on.
                reason = reason[:_MAX_LOGGED] + self.block_store.layout_hint()
                log.error("refused_by_conductor", reason=reason, sender=peer.hex())
                self._conductors.pop(peer, None)
            case Cancel():
                pass  # no request is held here
            case _:
                assert_never(message)

    # -- commands ----------------------------------------------------------------------------

    def _on_hello(self, peer: PeerId, hello: Hello) -> None:
        if fault := version_fault(hello.conductor_id, hello.min_version, hello.max_version):
            log.error("conductor_refused", reason=fault)
            self._outbox.answer(peer, wrong_version(hello.max_version))
            return
        if hello.conductor_id == ConductorId(self.info.worker_id):
            log.warning("name_asked_for", worker_id=hello.conductor_id)  # see `name_check`
        else:
            self._conductors[peer] = hello.conductor_id
        self._outbox.answer(peer, Welcome(worker=self.info))

    async def _on_reserve(self, peer: PeerId, put: ReserveBlocks) -> None:
        if self.info.draining:
            reason = f"{self.info.worker_id} is stopping: use another one"
            self._refuse(peer, put.ticket, reason, code=error_codes.DRAINING)
            return
        try:
            tiers = await self.block_store.tiers_for(put)
        except (LayoutMismatch, ValueError) as error:
            self._refuse(peer, put.ticket, str(error), code=code_of(error))
            return
        if tiers.would_make_cycle(put.hashes, put.parent):
            reason = "a block of these is its own ancestor here"
            self._refuse(peer, put.ticket, reason, code=error_codes.INVALID)
            return
        now = self._clock.now()
        try:
            reserved = tiers.reserve(
                owner_of(peer), put.ticket, put.hashes, put.parent, now, tenant=put.tenant
            )
        except CacheError as error:
            retry_after_s = error.retry_after_s if isinstance(error, CacheFull) else 0.0
            self._refuse(peer, put.ticket, str(error), retry_after_s, code=error.code)
            self.block_store.run_commands()
            return
        try:
            region = self.block_store.keys.lend_to_write(
                (owner_of(peer), put.ticket),
                [slot for _, slot in reserved.places],
                self._settings.reservation_ttl_s,
            )
        except NoKeyLeft as error:
            tiers.revoke(owner_of(peer), put.ticket)
            retry_after_s = self._settings.reservation_ttl_s
            self._refuse(peer, put.ticket, str(error), retry_after_s, code=error_codes.NO_ROOM)
        else:
            kept = kept_for_events(put, with_tokens=self._settings.event_tokens)
            self._puts[peer, put.ticket] = _Put(kept, now + self._settings.reservation_ttl_s)
            promised = {block for block, _ in reserved.places}
            answer = BlocksReserved(
                ticket=put.ticket,
                region=region,
                places=tuple(
                    Place(block, slot * put.layout.block_bytes) for block, slot in reserved.places
                ),
                expires_s=self._settings.reservation_ttl_s,
                not_stored=tuple(
                    block for block in put.hashes if block not in promised and block not in tiers
                ),
            )
            self._outbox.answer(peer, answer)
        self.block_store.run_commands()

    def _on_commit(self, peer: PeerId, commit: CommitBlocks) -> None:
        put = self._puts.get((peer, commit.ticket))
        if put is None or self.tiers is None:
            reason = f"ticket {commit.ticket} has no reservation here, or it ran out"
            self._refuse(peer, commit.ticket, reason, code=error_codes.NOT_HELD)
            return
        try:
            stored = self.tiers.commit(
                owner_of(peer), commit.ticket, commit.checksums, self._clock.now()
            )
        except (CacheError, ValueError) as error:
            self._refuse(peer, commit.ticket, str(error), code=code_of(error))
            return
        del self._puts[peer, commit.ticket]
        self._outbox.publish(stored_events(put.reserved, stored))
        self._outbox.answer(peer, BlocksCommitted(ticket=commit.ticket))
        self.block_store.run_commands()

    def _on_lease(self, peer: PeerId, wanted: LeaseBlocks) -> None:
        self._traces.on_asked(peer, wanted, self._clock.now())
        if self.tiers is None or self.info.layout is None:
            self.block_store.answer_lease(peer, wanted.ticket)
            return
        try:
            self.info.layout.require_same(wanted.layout, self.info.worker_id, "the reader")
            self.tiers.lease(owner_of(peer), wanted.ticket, wanted.hashes, self._clock.now())
        except (LayoutMismatch, CacheError) as error:
            self._refuse(peer, wanted.ticket, str(error), code=code_of(error))
            self._traces.on_refused(peer, wanted.ticket, str(error), self._clock.now())
        self.block_store.run_commands()

    def _on_renew(self, peer: PeerId, ticket: Ticket) -> None:
        now = self._clock.now()
        if self.tiers is None or not self.tiers.renew(owner_of(peer), ticket, now):
            reason = f"ticket {ticket} has no lease or reservation here, or it ran out"
            self._refuse(peer, ticket, reason, code=error_codes.NOT_HELD)
            return
        put = self._puts.get((peer, ticket))
        ttl_s = self._settings.lease_ttl_s if put is None else self._settings.reservation_ttl_s
        self.block_store.keys.on_renewed((owner_of(peer), ticket), ttl_s)
        if put is not None:
            until_s = now + ttl_s
            self._puts[peer, ticket] = _Put(put.reserved, until_s)
        self._outbox.answer(peer, LeaseRenewed(ticket=ticket, expires_s=ttl_s))

    def _on_replicate(self, peer: PeerId, order: ReplicateBlocks) -> None:
        if self._replication is None or self._tasks is None or self.info.draining:
            code = error_codes.DRAINING if self.info.draining else error_codes.UNSUPPORTED
            self._refuse(peer, order.ticket, f"{self.info.worker_id} copies no blocks", code=code)
        elif (refused := self._replication.refusal(order)) is not None:
            self._outbox.answer(peer, refused)
        else:
            self._tasks.create_task(self._replication.replicate(peer, order))

    def _refuse(
        self,
        peer: PeerId,
        ticket: Ticket,
        reason: str,
        retry_after_s: float = 0.0,
        *,
        code: str,
    ) -> None:
        refused = KvstoreRefused(
            ticket=ticket, reason=reason, retry_after_s=retry_after_s, code=code
        )
        self._outbox.answer(peer, refused)

    def _on_lost(self, peer: PeerId) -> None:
        """Release the leases and reservations of a caller that is gone."""
        self._traces.on_peer_lost(peer, self._clock.now())
        if self.tiers is not None:
            self.tiers.forget_owner(owner_of(peer))
        self._puts = {key: put for key, put in self._puts.items() if key[0] != peer}
        self._conductors.pop(peer, None)

    # -- as time passes ----------------------------------------------------------------------

    async def _housekeep(self) -> None:
        """Drop expired reservations, evict ahead of demand, and publish the load."""
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            if (tiers := self.tiers) is None:
                continue
            now = self._clock.now()
            self._puts = {key: put for key, put in self._puts.items() if put.deadline_s > now}
            tiers.on_tick(now)
            self.block_store.look_for_room()
            await self._scrubber.scrub()
            self.block_store.run_commands()
            await self._outbox.send()
            await self._port.publish(load_message(tiers, self._outbox.sequence))

    def metrics(self) -> MetricSnapshot:
        """Return the metrics; none before the layout is known."""
        if self.tiers is None or self.info.layout is None:
            return {}
        return kvstore_metrics(
            self.tiers,
            self.info.layout.block_bytes,
            self._outbox.sequence + 1,
            self.block_store.missing_disk_bytes,
        )
