"""Build the real services of a simulated process, each as its `app.py` does.

What differs from a deployment: network, metadata store, clock, threads and engine are arguments.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol import features
from halfmoon_protocol.ids import ConductorId, WorkerId, original_request_id
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost, Role, StartPrefill, WorkerInfo
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.membership import (
    Membership,
    find_model_worker,
    list_members,
    next_generation,
    until_done,
)
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_scheduling.commands import AnyCommand, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_testing.sim_cluster.sim_disk import VirtualDisk
from halfmoon_testing.sim_cluster.sim_metadata import SimMetadataServer, SimStore
from halfmoon_testing.sim_cluster.sim_network import ProcessNetwork, SimNetwork
from halfmoon_testing.sim_cluster.sim_paths import SimPath
from halfmoon_testing.sim_cluster.sim_shape import (
    BLOCK_SIZE,
    MODEL,
    QUARANTINE_S,
    ClusterShape,
)
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess
from halfmoon_testing.sim_cluster.virtual_threads import (
    VirtualEngineThreads,
    VirtualExecutor,
    VirtualForwardThread,
    sleep_in_thread,
    wait_in_thread,
)
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.settings import TransferSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker

#: Seconds of a worker's lease.
LEASE_S = 10.0
_PREFILL_COST = PrefillCost(4e-3, 2e-4)
_DECODE_COST = DecodeCost(4e-3, 2e-4)


@dataclass
class SimWorld:
    """Hold what all processes of one run share."""

    loop: VirtualLoop
    #: Draws what happens to messages, bytes and threads.
    dice: random.Random
    shape: ClusterShape
    network: SimNetwork
    metadata: SimMetadataServer
    #: Draws when late writes land.
    late_dice: random.Random
    disks: dict[str, VirtualDisk] = field(default_factory=dict)
    path: SimPath = field(init=False)

    def __post_init__(self) -> None:
        self.path = SimPath(self.dice, self.network, self.late_dice)


@dataclass(frozen=True)
class ProcessClock:
    """The clock of one process: its zero is its own."""

    loop: VirtualLoop
    offset_s: float

    def now(self) -> float:
        """See `Clock.now`."""
        return self.loop.time() + self.offset_s


class SimService:
    """One start of a service in a process of its own."""

    def __init__(self, world: SimWorld, name: str, role: Role | str) -> None:
        """Make the process; `serve` is its main task."""
        self.world = world
        self.name = name
        self.role = role
        self.process = VirtualProcess(name)
        self.clock = ProcessClock(world.loop, world.dice.uniform(0.0, 1e5))
        #: Seconds by which this machine's wall clock is wrong.
        self.wall_error_s = 0.0
        self.network = ProcessNetwork(world.network, self.process, self.wall_clock)
        self.store = SimStore(
            world.metadata, lambda: not world.network.is_cut(self.process.name, "metadata")
        )
        self.worker: Any = None
        self.engine: FakeEngine | None = None
        self.transfer: TransferEngine | None = None
        self.conductor: SimConductor | None = None
        #: Set once the service is registered.
        self.is_ready = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process."""
        serve: dict[str, Callable[[], Awaitable[None]]] = {
            "conductor": self._serve_conductor,
            "prefill": self._serve_prefill,
            "decode": self._serve_decode,
            "kvstore": self._serve_kvstore,
        }

        async def run() -> None:
            await serve[self.role]()

        self.task = self.world.loop.start(self.process, run(), self.name)

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        self.world.loop.kill(self.process)
        self.world.network.on_killed(self.process)
        if self.transfer is not None:
            self.transfer.backend(SimPath.name).close()
        if (disk := self.world.disks.get(self.name)) is not None:
            disk.on_killed()

    def wall_clock(self) -> float:
        """Return the seconds since 1970 as this machine has them."""
        return 1.7e9 + self.world.loop.time() + self.wall_error_s

    # -- services ------------------------------------------------------------------------------

    async def _serve_conductor(self) -> None:
        self.conductor = SimConductor(self)
        self.is_ready = True
        await self.conductor.links.run()

    async def _serve_kvstore(self) -> None:
        shape, world = self.world.shape, self.world
        settings = _kvstore_settings(self.name)
        generation = await self._open_transfer()
        assert self.transfer is not None
        n_bytes = shape.n_kvstore_blocks * fake_layout().block_bytes
        memory = await asyncio.to_thread(self.transfer.allocate, n_bytes)
        port = await self.network.bind(self.name)
        info = msgspec.structs.replace(self._info("kvstore", generation, port), replicates=True)
        membership = self._membership(info)
        disk = None
        if shape.n_disk_blocks:
            disk = world.disks.setdefault(self.name, VirtualDisk(world.dice, shape.n_disk_blocks))
            disk.on_started()
        kvstores = KvstoreClients(self.network, 2.0)

        async def members() -> list[WorkerInfo]:
            return list((await list_members(self.store)).values())

        worker = KvstoreWorker(
            port,
            memory,
            info,
            settings,
            self.clock,
            membership.update,
            disk,  # type: ignore[arg-type]
            ReplicaReader(kvstores, self.transfer, memory),
            None,
            lambda: find_model_worker(members),
        )
        await self._serve(worker, membership)

    async def _serve_prefill(self) -> None:
        shape = self.world.shape
        index = int(self.name.rpartition("-")[2])
        home = f"kvstore-{index % shape.n_kvstore}"
        settings = _prefill_settings(self.name, home, shape.chunk_tokens)
        generation = await self._open_transfer()
        assert self.transfer is not None
        engine, memory = await self._open_engine()
        port = await self.network.bind(self.name)
        info = msgspec.structs.replace(
            self._info("prefill", generation, port, engine),
            home_kvstore=WorkerId(home),
            prefill_cost=_PREFILL_COST,
            skips_held_blocks=True,
        )
        worker = PrefillWorker(
            port=port,
            forward=PrefillForward(
                engine, self.transfer.submit, memory.region, self.clock, wait_for=wait_in_thread
            ),
            transfer=self.transfer,
            memory=memory,
            kvstores=KvstoreClients(self.network, settings.kvstore_timeout_s),
            info=info,
            settings=settings,
            clock=self.clock,
            pages=PageAllocator(shape.n_pages),
            open_forward=self._forward_thread,
            watch=ForwardWatchdog(now=self.clock.now),
            checksum_thread=VirtualExecutor(self.world.loop),
        )
        await self._serve(worker, self._membership(info), self._endpoints().keep())

    async def _serve_decode(self) -> None:
        shape = self.world.shape
        settings = _decode_settings(self.name, shape.keeps_answers, shape.keeps_pages)
        generation = await self._open_transfer()
        assert self.transfer is not None
        engine, memory = await self._open_engine()
        port = await self.network.bind(self.name)
        info = msgspec.structs.replace(
            self._info("decode", generation, port, engine),
            decode_cost=_DECODE_COST,
            keeps_answers=shape.keeps_answers,
            keeps_pages=shape.keeps_pages,
            skips_held_blocks=True,
        )
        kvstores = KvstoreClients(self.network, settings.kvstore_timeout_s)
        replicas = ReplicaSelector(kvstores, engine.layout, self.clock)
        putter = BlockPutter(replicas, self.transfer, memory, engine.layout)
        worker = DecodeWorker(
            port=port,
            engine=engine,
            region=memory.region,
            info=info,
            settings=settings,
            clock=self.clock,
            pages=PageAllocator(shape.n_pages),
            putter=putter if shape.keeps_answers else None,
            open_forward=self._forward_thread,
            watch=ForwardWatchdog(now=self.clock.now),
        )
        await self._serve(worker, self._membership(info))

    # -- parts ---------------------------------------------------------------------------------

    async def _open_transfer(self) -> int:
        world = self.world
        generation = await next_generation(self.store, WorkerId(self.name))

        def open_published() -> TransferEngine:
            return TransferEngine.open(
                self.name,
                metadata=self.store,
                generation=generation,
                backends=[world.path.of(self.process)],
                host_id="simulated",
                settings=TransferSettings(
                    copy_here_bytes=0, batch_bytes=world.shape.batch_bytes, copy_slice_bytes=512
                ),
                threads=VirtualEngineThreads(world.loop, world.path.carry_s),
            )

        # As `open_worker` does.
        self.transfer = await until_done(
            f"segment of {self.name}", lambda: asyncio.to_thread(open_published)
        )
        return generation

    async def _open_engine(self) -> tuple[FakeEngine, Any]:
        assert self.transfer is not None
        engine = FakeEngine(MODEL, block_size=BLOCK_SIZE, sleep=sleep_in_thread)
        n_bytes = self.world.shape.n_pages * engine.layout.block_bytes
        memory = await asyncio.to_thread(self.transfer.allocate, n_bytes)
        engine.attach(memory.view)
        self.engine = engine
        return engine, memory

    def _forward_thread(self) -> VirtualForwardThread:
        return VirtualForwardThread(self.world.loop, self.process)

    def _endpoints(self) -> PeerEndpointCache:
        assert self.transfer is not None
        return PeerEndpointCache(self.store, self.transfer, WorkerId(self.name), now=self.clock.now)

    def _info(
        self, role: Role, generation: int, port: Any, engine: FakeEngine | None = None
    ) -> WorkerInfo:
        more: dict[str, Any] = {}
        if engine is not None:
            more = {
                "layout": engine.layout,
                "model": "m",
                "max_context": engine.max_context,
                "n_blocks": self.world.shape.n_pages,
                "features": features.ALL,
            }
        return WorkerInfo(
            worker_id=WorkerId(self.name),
            role=role,
            generation=generation,
            host="simulated",
            commands=port.commands,
            events=port.events,
            **more,
        )

    def _membership(self, info: WorkerInfo) -> Membership:
        assert self.transfer is not None
        return Membership(
            self.store,
            info,
            ttl_s=LEASE_S,
            now=self.clock.now,
            restore=self.transfer.restore_record,
        )

    async def _serve(self, worker: Any, membership: Membership, *more: Any) -> None:
        """Serve until killed; see `registered_worker`."""
        self.worker = worker
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            tasks.create_task(worker.serve())
            for each in more:
                tasks.create_task(each)
            await membership.join()
            self.is_ready = True
            await membership.keep_alive()


class SimConductor:
    """The parts of one start of a conductor."""

    def __init__(self, service: SimService) -> None:
        """Build them."""
        self.core = Conductor(service.world.shape.scheduling())
        self.record = DecisionRecord()
        self.shell = Shell(self.core, service.clock, recorders=[self.record.on_event])
        self.gateway = CoreGateway(self.shell, wall_clock=service.wall_clock)
        self.links = WorkerLinks(
            service.network,
            service.store,
            ConductorId(service.name),
            self.shell,
            self.gateway,
            ClusterMetrics(self.core, CollectorRegistry(), service.wall_clock),
        )
        self.shell.connect(self.links, self.gateway)


class DecisionRecord:
    """Record what one conductor decides about each try of each request."""

    def __init__(self) -> None:
        """Record nothing yet."""
        #: Tries of which a prefill worker was told to compute the prompt.
        self.prefilled: set[str] = set()
        #: Requests, by the client's id, that were placed more than once.
        self.tried_again: set[str] = set()
        #: Tries that were refused although a prefill worker had got them.
        self.wasted: list[str] = []

    def on_event(self, now: float, event: object, commands: list[AnyCommand]) -> None:
        """Record the decisions that follow from an event."""
        for command in commands:
            match command:
                case Send(message=StartPrefill(request_id=request_id)):
                    self.prefilled.add(request_id)
                case Resubmit(request_id=request_id):
                    self.tried_again.add(original_request_id(request_id))
                case Reject(request_id=request_id) if request_id in self.prefilled:
                    self.wasted.append(request_id)


@lru_cache
def fake_layout() -> KvLayout:
    """Return the layout of all blocks."""
    return FakeEngine(MODEL, block_size=BLOCK_SIZE).layout


@lru_cache
def _kvstore_settings(name: str) -> KvstoreSettings:
    return KvstoreSettings(worker_id=name, capacity_mib=1, reservation_ttl_s=6.0, lease_ttl_s=3.0)


@lru_cache
def _prefill_settings(name: str, home: str, chunk_tokens: int) -> PrefillSettings:
    return PrefillSettings(
        worker_id=name,
        model="m",
        home_kvstore=home,
        chunk_tokens=chunk_tokens,
        max_chunk_tokens=4 * chunk_tokens,
        kvstore_timeout_s=1.0,
        kvstore_read_s=2.0,
    )


@lru_cache
def _decode_settings(name: str, keeps_answers: bool, keeps_pages: bool) -> DecodeSettings:
    return DecodeSettings(
        worker_id=name,
        model="m",
        landing_ttl_s=30.0,
        quarantine_s=QUARANTINE_S,
        keep_answers=keeps_answers,
        keep_pages=keeps_pages,
        max_running=16,
        kvstore_timeout_s=1.0,
    )
