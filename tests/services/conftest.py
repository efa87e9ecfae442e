"""All services in one process: real workers, engines and transfer, over the memory network.

What differs from a deployment is only how messages and bytes travel; one test directory up,
`tests/e2e`, runs the same services as processes over ZeroMQ and TCP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_conductor.build_conductor import build_conductor
from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, TokenEvent
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_engine.interface import Engine
from halfmoon_kvstore.build_kvstore import build_kvstore
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import DecodeCost, PrefillCost, Role
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.clock import Clock, SystemClock
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.open_model import PlacedModel
from halfmoon_runtime.worker.worker_env import WorkerEnv, open_env
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.decode.build_decode import build_decode
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.prefill.build_prefill import build_prefill
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import open_stage
from halfmoon_workers.start.worker_start import BuiltWorker, WorkerStart

GREEDY = Sampling(temperature=0.0)
EngineMaker = Callable[[], Engine]
#: Seconds of a worker's lease: so long may a busy machine keep this process from renewing it.
LEASE_S = 600.0


@dataclass
class Member:
    """One running worker."""

    worker: Any
    task: asyncio.Task[None]
    engine: Engine | None
    transfer: TransferEngine


@dataclass
class LocalCluster:
    """The conductor and the workers, and a client's way in."""

    make_engine: EngineMaker
    stack: AsyncExitStack
    config: SchedulingConfig
    n_pages: int = 1024
    chunk_tokens: int = 512
    kvstore_mib: int = 64
    #: Where kvstores have a disk tier, each in a folder of its name; None: they have none.
    kvstore_disks: Path | None = None
    tenant_quotas_mib: str = ""
    backends: Sequence[Any] = ("memory",)
    #: Prefill workers of each group; 0: there are no groups. Their engines are fakes.
    group_size: int = 0
    group_chunk_tokens: int = 64
    #: Whether prefill workers say so in their records.
    skips_held_blocks: bool = True
    prefill_settings: dict[str, Any] = field(default_factory=dict)
    decode_settings: dict[str, Any] = field(default_factory=dict)
    kvstore_settings: dict[str, Any] = field(default_factory=dict)
    #: What time it is at kvstores.
    kvstore_clock: Clock = field(default_factory=SystemClock)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    store: MemoryStore = field(default_factory=MemoryStore)
    clock: SystemClock = field(default_factory=SystemClock)
    members: dict[str, Member] = field(default_factory=dict)
    #: The registered memory of each worker.
    memories: dict[str, Any] = field(default_factory=dict)
    n_requests: int = 0

    async def open(self, n_prefill: int, n_decode: int, n_kvstore: int) -> None:
        built = build_conductor(
            ConductorId("conductor-0"), self.store, self.network, self.config, clock=self.clock
        )
        self.core, self.shell, self.gateway = built.core, built.shell, built.gateway
        self.hub = built.links
        running = asyncio.create_task(built.run())
        self.stack.push_async_callback(_cancel, running)
        for i in range(n_kvstore):
            await self.start_kvstore(f"kvstore-{i}")
        for i in range(n_prefill):
            home = f"kvstore-{i % n_kvstore}" if n_kvstore else ""
            await self.start_prefill(f"prefill-{i}", home_kvstore=home)
        for i in range(n_decode):
            await self.start_decode(f"decode-{i}")
        await self.until(
            lambda: (
                [
                    len(self.core.cluster.accepting(role))
                    for role in ("prefill", "decode", "kvstore")
                ]
                == [n_prefill, n_decode, n_kvstore]
            )
        )

    # -- workers -----------------------------------------------------------------------------

    async def start_kvstore(self, name: str) -> KvstoreWorker:
        env = await self._open_env(name, "kvstore", self.kvstore_clock)
        settings = KvstoreSettings(
            worker_id=name,
            capacity_mib=self.kvstore_mib,
            tenant_quotas_mib=self.tenant_quotas_mib,
            promotion_wait_s=60.0,
            **self.kvstore_settings,
        )
        memory = self.memories[name] = env.transfer.allocate(settings.capacity_bytes)
        disk = None
        if self.kvstore_disks is not None:
            disk = SegmentFolder(self.kvstore_disks / name, 64 << 20, env.info.generation)
            self.stack.callback(disk.close)
        built = build_kvstore(env, memory, disk, settings, self.stack)
        await self._run(built.worker, built.membership, None, env.transfer)
        return built.worker

    def _place(self, name: str, engine: Engine, transfer: TransferEngine) -> PlacedModel[Any]:
        n_bytes = self.n_pages * engine.layout.block_bytes
        memory: PoolMemory
        buffer: Any = engine.allocate_pool(n_bytes)
        if buffer is not None:
            memory = transfer.register_device(buffer)
        else:
            on_host = transfer.allocate(n_bytes)
            engine.attach(on_host.view)
            memory = on_host
        self.memories[name] = memory
        # Less at decode than at prefill, so that what may be prefilled at decode is.
        cost = PrefillCost(1e-3, 1e-5)
        if name.startswith("prefill"):
            cost = PrefillCost(1.0, 1e-3) if self.decode_settings else PrefillCost()
        return PlacedModel(memory, self.n_pages, cost, DecodeCost(), ForwardWatchdog())

    async def start_prefill(self, name: str, **settings: Any) -> PrefillWorker:
        env = await self._open_env(name, "prefill")
        chunks = {"chunk_tokens": self.chunk_tokens, "max_chunk_tokens": self.chunk_tokens}
        settings = chunks | self._stage_settings(name) | self.prefill_settings | settings
        config = PrefillSettings(worker_id=name, model="m", **settings)
        engine = await asyncio.to_thread(self.make_engine)
        stage_engine = None
        if config.stage_record is not None:
            stage_engine = await open_stage(engine, config.stage_record)
            engine = stage_engine if config.stage_layers_only else engine
        placed = self._place(name, engine, env.transfer)
        start = WorkerStart(env, engine, placed, placed.memory, stage_engine=stage_engine)
        built = build_prefill(start, config, self.stack)
        await self._run_built(start, built)
        return built.worker

    def _stage_settings(self, name: str) -> dict[str, Any]:
        if not self.group_size:
            return {}
        group, stage = divmod(int(name.rpartition("-")[2]), self.group_size)
        return {
            "group": f"group-{group}",
            "stage": f"{stage}/{self.group_size}",
            "group_chunk_tokens": self.group_chunk_tokens,
        }

    async def start_decode(self, name: str, **settings: Any) -> DecodeWorker:
        env = await self._open_env(name, "decode")
        engine = await asyncio.to_thread(self.make_engine)
        placed = self._place(name, engine, env.transfer)
        config = DecodeSettings(worker_id=name, model="m", **{**self.decode_settings, **settings})
        start = WorkerStart(env, engine, placed, placed.memory)
        built = build_decode(start, config, self.stack)
        await self._run_built(start, built)
        return built.worker

    async def kill(self, name: str) -> None:
        """End a worker as `kill -9` would: its port is gone, nobody is told."""
        member = self.members.pop(name)
        self.network.kill(name)
        await _cancel(member.task)
        if (stages := getattr(member.worker, "stages", None)) is not None:
            await stages.close()
        member.transfer.close()
        self.store.delete(f"halfmoon/members/{name}")

    def worker(self, name: str) -> Any:
        return self.members[name].worker

    async def _open_env(
        self, name: str, role: Role, clock: Clock | None = None
    ) -> WorkerEnv[TransferEngine]:
        async def open_transfer(generation: int) -> TransferEngine:
            return TransferEngine.open(
                name, metadata=self.store, generation=generation, backends=self.backends
            )

        env = await open_env(
            WorkerId(name),
            role,
            self.store,
            self.network,
            open_transfer,
            host_id="here",
            clock=clock or self.clock,
            lease_s=LEASE_S,
        )
        self.stack.callback(env.transfer.close)
        return env

    async def _run_built(self, start: WorkerStart, built: BuiltWorker[Any]) -> None:
        info = built.info
        if info.role == "prefill" and not self.skips_held_blocks:
            info = built.worker.info = msgspec.structs.replace(info, skips_held_blocks=False)
        membership = start.env.membership(info)
        await self._run(built.worker, membership, start.engine, start.env.transfer)
        for run in built.beside:
            self.stack.push_async_callback(_cancel, asyncio.create_task(run()))

    async def _run(
        self,
        worker: Any,
        membership: Membership,
        engine: Engine | None,
        transfer: TransferEngine,
    ) -> None:
        name = str(membership.info.worker_id)
        task = asyncio.create_task(worker.serve(), name=name)
        self.stack.push_async_callback(_cancel, task)
        self.members[name] = Member(worker, task, engine, transfer)
        await membership.join()
        keeping = asyncio.create_task(membership.keep_alive())
        self.stack.push_async_callback(_cancel, keeping)

    # -- clients -----------------------------------------------------------------------------

    async def events(
        self,
        prompt: Sequence[int],
        n_new: int,
        sampling: Sampling = GREEDY,
        **more: Any,
    ) -> AsyncIterator[TokenEvent]:
        """Generate like a client, token by token."""
        self.n_requests += 1
        stopping = more.pop("stopping", Stopping(max_new_tokens=n_new))
        request = GenerationRequest(
            request_id=f"cmpl-{self.n_requests}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            stopping=stopping,
            **more,
        )
        async for event in self.gateway.generate(request):
            yield event

    async def generate(self, prompt: Sequence[int], n_new: int, **more: Any) -> list[int]:
        return [event.token async for event in self.events(prompt, n_new, **more)]

    async def n_cached(self, prompt: Sequence[int], n_new: int = 1) -> int:
        """Cached tokens that one more request with this prompt reports."""
        first, *_ = [event.n_cached async for event in self.events(prompt, n_new)]
        return first

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def settled(self, *, stores: bool = True) -> None:
        """Wait until no worker holds anything for a request, and audit everybody.

        What a killed prefill had reserved at a kvstore ends by its deadline only: then
        without `stores`.
        """
        await self.until(
            lambda: all(
                w.pages.n_free == w.pages.n_pages
                for w in (m.worker for m in self.members.values())
                if hasattr(w, "pages")
            )
        )
        if stores:
            await self.until(
                lambda: all(
                    w.tiers is None
                    or (w.tiers.memory.n_reserved, w.tiers.memory.n_leased) == (0, 0)
                    for w in (m.worker for m in self.members.values())
                    if hasattr(w, "tiers")
                )
            )
        await self.until(lambda: not any(self.core.n_requests.values()))
        for member in self.members.values():
            if hasattr(member.worker, "check"):
                member.worker.check()
        self.core.check()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def open_cluster(
    make_engine: EngineMaker = lambda: FakeEngine(),
    *,
    n_prefill: int = 1,
    n_decode: int = 1,
    n_kvstore: int = 1,
    config: SchedulingConfig | None = None,
    **more: Any,
) -> AsyncIterator[LocalCluster]:
    async with AsyncExitStack() as stack:
        cluster = LocalCluster(make_engine, stack, config or SchedulingConfig(), **more)
        stack.push_async_callback(cluster.network.close)
        await cluster.open(n_prefill, n_decode, n_kvstore)
        yield cluster


@pytest.fixture
def local_cluster() -> Callable[..., Any]:
    """`open_cluster`, for tests: ``async with local_cluster(...) as cluster``."""
    return open_cluster
