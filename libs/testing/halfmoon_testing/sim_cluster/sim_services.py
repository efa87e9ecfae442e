"""Run the real services in simulated processes, on virtual network, store, clock and threads."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from halfmoon_conductor.build_conductor import BuiltConductor, build_conductor
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_engine.interface import Engine
from halfmoon_kvstore.build_kvstore import build_kvstore
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_protocol.ids import ConductorId, WorkerId, original_request_id
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import DecodeCost, PrefillCost, Role, StartPrefill
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.open_model import PlacedModel
from halfmoon_runtime.worker.worker_env import WorkerEnv, open_env
from halfmoon_scheduling.commands import AnyCommand, Reject, Resubmit, Send
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
from halfmoon_testing.sim_cluster.sim_tracer import SimTracer
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess
from halfmoon_testing.sim_cluster.virtual_threads import (
    VirtualEngineThreads,
    VirtualExecutor,
    VirtualForwardThread,
    sleep_in_thread,
    wait_in_thread,
)
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.grant_lender import GrantChoice
from halfmoon_transfer.settings import TransferSettings
from halfmoon_workers.decode.build_decode import build_decode
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.prefill.build_prefill import build_prefill
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import open_stage
from halfmoon_workers.start.role_change_times import RoleChangeTimes
from halfmoon_workers.start.role_switch import RoleSwitch
from halfmoon_workers.start.serve_worker import until_spared
from halfmoon_workers.start.worker_pool import WorkerPool
from halfmoon_workers.start.worker_start import BuiltWorker, WorkerStart, WorkerThreads

#: Seconds of a worker's lease.
LEASE_S = 10.0
#: Seconds in which a worker that changes its role finishes requests, and in which it keeps a role.
DRAIN_S = 5.0
ROLE_COOLDOWN_S = 1.0
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


async def _forever() -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()


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
        self.stage_engine: Engine | None = None
        self.pool = WorkerPool()
        self.tracer = SimTracer() if world.shape.traces else None
        self.transfer: TransferEngine | None = None
        self.conductor: BuiltConductor | None = None
        self.record = DecisionRecord()
        #: Set once the service is registered.
        self.is_ready = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process."""
        serve: dict[str, Callable[[], Awaitable[None]]] = {
            "conductor": self._serve_conductor,
            "prefill": self._serve_worker,
            "decode": self._serve_worker,
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
        self.conductor = build_conductor(
            ConductorId(self.name),
            self.store,
            self.network,
            self.world.shape.scheduling(),
            clock=self.clock,
            wall_clock=self.wall_clock,
            recorders=[self.record.on_event],
            tracer=self.tracer,
        )
        self.is_ready = True
        await self.conductor.run()

    async def _serve_kvstore(self) -> None:
        shape, world = self.world.shape, self.world
        env = await self._open_env("kvstore")
        n_bytes = shape.n_kvstore_blocks * fake_layout().block_bytes
        memory = await asyncio.to_thread(env.transfer.allocate, n_bytes)
        disk: Any = None
        if shape.n_disk_blocks:
            disk = world.disks.setdefault(self.name, VirtualDisk(world.dice, shape.n_disk_blocks))
            disk.on_started()
        settings = _kvstore_settings(self.name, shape.grants)
        async with AsyncExitStack() as stack:
            built = build_kvstore(env, memory, disk, settings, stack, self.tracer)
            await self._serve(built.worker, built.membership)

    async def _serve_worker(self) -> None:
        """Serve in one role after another, as `run_worker` does."""
        shape, loop = self.world.shape, self.world.loop
        self.engine = FakeEngine(MODEL, block_size=BLOCK_SIZE, sleep=sleep_in_thread)
        memory = await asyncio.to_thread(
            self.pool.allocate, shape.n_pages * self.engine.layout.block_bytes
        )
        self.engine.attach(memory.view)
        watch = ForwardWatchdog(now=self.clock.now)
        placed = PlacedModel[Any](memory, shape.n_pages, _PREFILL_COST, _DECODE_COST, watch)
        threads = WorkerThreads(
            open_forward=lambda: VirtualForwardThread(loop, self.process),
            wait_for=wait_in_thread,
            checksums=VirtualExecutor(loop),
        )
        roles: tuple[Role, ...] = ("prefill", "decode") if shape.changes_roles else ()
        times = RoleChangeTimes(self.clock)
        switch = RoleSwitch(self.role, roles, ROLE_COOLDOWN_S, self.clock.now, times)  # type: ignore[arg-type]
        generation = 0
        while True:
            env = await self._open_env(self.role, above=generation)  # type: ignore[arg-type]
            generation = env.info.generation
            registered = await asyncio.to_thread(self.pool.register, env.transfer)
            start = WorkerStart(
                env, self.engine, placed, registered, switch, self.tracer, threads=threads
            )
            rest_s = await self._serve_role(start)
            await asyncio.to_thread(env.transfer.close)
            await env.port.close()
            times.next_phase()
            await asyncio.sleep(rest_s)
            self.role = switch.complete()

    async def _serve_role(self, start: WorkerStart) -> float:
        """Serve until the role is to change; return the seconds for which the pool rests."""
        shape = self.world.shape
        async with AsyncExitStack() as stack:
            built: BuiltWorker[PrefillWorker] | BuiltWorker[DecodeWorker]
            if self.role == "prefill":
                home = f"kvstore-{int(self.name.rpartition('-')[2]) % shape.n_kvstore}"
                settings = _prefill_settings(self.name, home, shape)
                if settings.stage_record is not None:
                    self.stage_engine = await open_stage(start.engine, settings.stage_record)
                    start = replace(start, stage_engine=self.stage_engine)
                built = build_prefill(start, settings, stack)
            else:
                built = build_decode(start, _decode_settings(self.name, shape), stack)
            membership = start.env.membership(built.info)
            start.switch.on_serving()
            await self._serve(
                built.worker, membership, built.beside, lambda: until_spared(start, membership)
            )
            n_given_up = built.worker.batch.n_reserved if self.role == "decode" else 0  # type: ignore[union-attr]
            self.worker = None
        return QUARANTINE_S if n_given_up else 0.0

    # -- parts ---------------------------------------------------------------------------------

    async def _open_env(self, role: Role, above: int = 0) -> WorkerEnv[TransferEngine]:
        world = self.world

        async def open_transfer(generation: int) -> TransferEngine:
            return await asyncio.to_thread(
                lambda: TransferEngine.open(
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
            )

        env = await open_env(
            WorkerId(self.name),
            role,
            self.store,
            self.network,
            open_transfer,
            host_id="simulated",
            above=above,
            clock=self.clock,
            lease_s=LEASE_S,
        )
        self.transfer = env.transfer
        return env

    async def _serve(
        self,
        worker: KvstoreWorker | PrefillWorker | DecodeWorker,
        membership: Membership,
        beside: Iterable[Callable[[], Coroutine[Any, Any, None]]] = (),
        until_leaving: Callable[[], Awaitable[None]] = _forever,
    ) -> None:
        """Serve until the worker is to leave, and drain it; see `serve_worker`."""
        self.worker = worker
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(worker.serve())]
            running += [tasks.create_task(run()) for run in beside]
            await membership.join()
            running.append(tasks.create_task(membership.keep_alive()))
            self.is_ready = True
            await until_leaving()
            assert not isinstance(worker, KvstoreWorker), "a kvstore keeps its role"
            info = msgspec.structs.replace(membership.info, draining=True)
            await worker.drain(info, DRAIN_S)
            await membership.leave()
            for task in running:
                task.cancel()


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
def _kvstore_settings(name: str, grants: GrantChoice) -> KvstoreSettings:
    return KvstoreSettings(
        worker_id=name,
        capacity_mib=1,
        reservation_ttl_s=6.0,
        lease_ttl_s=3.0,
        transfer_grants=grants,
    )


@lru_cache
def _prefill_settings(name: str, home: str, shape: ClusterShape) -> PrefillSettings:
    stage = f"{name.rpartition('-')[2]}/{shape.n_prefill}" if shape.is_group else ""
    return PrefillSettings(
        worker_id=name,
        model="m",
        home_kvstore=home,
        chunk_tokens=shape.chunk_tokens,
        max_chunk_tokens=4 * shape.chunk_tokens,
        kvstore_timeout_s=1.0,
        kvstore_read_s=2.0,
        group="group-0" if stage else "",
        stage=stage,
        group_chunk_tokens=32,
    )


@lru_cache
def _decode_settings(name: str, shape: ClusterShape) -> DecodeSettings:
    return DecodeSettings(
        worker_id=name,
        model="m",
        landing_ttl_s=30.0,
        quarantine_s=QUARANTINE_S,
        keep_answers=shape.keeps_answers,
        keep_pages=shape.keeps_pages,
        max_running=16,
        kvstore_timeout_s=1.0,
        transfer_grants=shape.grants,
        local_prefill_tokens=shape.local_prefill_tokens,
    )
