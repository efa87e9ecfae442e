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

import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, TokenEvent
from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_engine.interface import Engine
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_metadata import MemoryStore
from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol import features
from halfmoon_protocol.ids import ConductorId, WorkerId
from halfmoon_protocol.messages import PrefillCost, Role, WorkerInfo
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.clock import Clock, SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.membership import Membership, next_generation
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.decode.local_prefills import LocalPrefillParts
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import host_view, open_stage, say_layers
from halfmoon_workers.prefill.stage_links import StageLinks

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
        self.core = Conductor(self.config)
        self.shell = Shell(self.core, self.clock)
        self.gateway = CoreGateway(self.shell)
        self.hub = WorkerLinks(
            self.network,
            self.store,
            ConductorId("conductor-0"),
            self.shell,
            self.gateway,
            ClusterMetrics(self.core, CollectorRegistry()),
        )
        self.shell.connect(self.hub, self.gateway)
        running = asyncio.create_task(self.hub.run())
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
        generation, transfer = await self._begin(name)
        settings = KvstoreSettings(
            worker_id=name,
            capacity_mib=self.kvstore_mib,
            tenant_quotas_mib=self.tenant_quotas_mib,
            promotion_wait_s=60.0,
            **self.kvstore_settings,
        )
        memory = transfer.allocate(settings.capacity_bytes)
        self.memories[name] = memory
        port = await self.network.bind(name)
        info = self._info(name, "kvstore", generation, port)
        membership = self._membership(info)
        disk = None
        if self.kvstore_disks is not None:
            disk = SegmentFolder(self.kvstore_disks / name, 64 << 20, generation)
            self.stack.callback(disk.close)
        worker = KvstoreWorker(
            port,
            memory,
            info,
            settings,
            self.kvstore_clock,
            membership.update,
            disk,
            lender=GrantLender(transfer, memory.region, settings.transfer_grants),
        )
        await self._run(name, worker, membership, None, transfer)
        return worker

    def _place(self, name: str, engine: Engine, transfer: TransferEngine) -> PoolMemory:
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
        return memory

    async def start_prefill(self, name: str, **settings: Any) -> PrefillWorker:
        generation, transfer = await self._begin(name)
        port = await self.network.bind(name)
        kvstores = KvstoreClients(self.network, timeout_s=2.0)
        self.stack.push_async_callback(kvstores.close)
        chunks = {"chunk_tokens": self.chunk_tokens, "max_chunk_tokens": self.chunk_tokens}
        settings = chunks | self._stage_settings(name) | self.prefill_settings | settings
        config = PrefillSettings(worker_id=name, model="m", **settings)
        engine = await asyncio.to_thread(self.make_engine)
        stage, stage_engine, stages = config.stage_record, None, None
        if stage is not None:
            stage_engine = await open_stage(engine, stage)
            stage = say_layers(stage, engine.layout.n_layers)
            engine = stage_engine if config.stage_layers_only else engine
        memory = self._place(name, engine, transfer)
        if stage_engine is not None:
            if stage_engine is not engine:
                stage_engine.attach(host_view(memory))
            stages = StageLinks(self.network)
            self.stack.push_async_callback(stages.close)
        info = self._info(
            name,
            "prefill",
            generation,
            port,
            engine,
            home_kvstore=WorkerId(config.home_kvstore) if config.home_kvstore else None,
            stage=stage,
            stage_layers_only=config.stage_layers_only,
            skips_held_blocks=self.skips_held_blocks,
        )
        worker = PrefillWorker(
            port=port,
            forward=PrefillForward(
                engine, transfer.submit, memory.region, self.clock, stage_engine
            ),
            transfer=transfer,
            memory=memory,
            kvstores=kvstores,
            info=info,
            settings=config,
            clock=self.clock,
            pages=PageAllocator(self.n_pages),
            stages=stages,
        )
        await self._run(name, worker, self._membership(info), engine, transfer)
        return worker

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
        generation, transfer = await self._begin(name)
        engine = await asyncio.to_thread(self.make_engine)
        memory = self._place(name, engine, transfer)
        port = await self.network.bind(name)
        config = DecodeSettings(worker_id=name, model="m", **{**self.decode_settings, **settings})
        kvstores = KvstoreClients(self.network, config.kvstore_timeout_s)
        self.stack.push_async_callback(kvstores.close)
        replicas = ReplicaSelector(kvstores, engine.layout, self.clock)
        putter = BlockPutter(replicas, transfer, memory, engine.layout)
        local = {
            "local_prefill_tokens": config.local_prefill_tokens,
            # Less than a prefill worker says, so that what may be prefilled at decode is.
            "prefill_cost": PrefillCost(1e-3, 1e-5) if config.local_prefill_tokens else None,
        }
        info = self._info(
            name,
            "decode",
            generation,
            port,
            engine,
            keeps_answers=config.keep_answers,
            keeps_pages=config.keep_pages,
            skips_held_blocks=True,
            **local,
        )
        worker = DecodeWorker(
            port=port,
            engine=engine,
            region=memory.region,
            info=info,
            settings=config,
            clock=self.clock,
            pages=PageAllocator(self.n_pages),
            putter=putter if config.keep_answers else None,
            lender=GrantLender(transfer, memory.region, config.transfer_grants),
            prefill_parts=LocalPrefillParts(transfer, memory, replicas),
        )
        await self._run(name, worker, self._membership(info), engine, transfer)
        return worker

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

    async def _begin(self, name: str) -> tuple[int, TransferEngine]:
        generation = await next_generation(self.store, WorkerId(name))
        transfer = TransferEngine.open(
            name, metadata=self.store, generation=generation, backends=self.backends
        )
        self.stack.callback(transfer.close)
        return generation, transfer

    def _info(
        self,
        name: str,
        role: Role,
        generation: int,
        port: Any,
        engine: Engine | None = None,
        **more: Any,
    ) -> WorkerInfo:
        if engine is not None:
            more |= {
                "layout": engine.layout,
                "model": "m",
                "max_context": engine.max_context,
                "n_blocks": self.n_pages,
                "features": features.ALL,
            }
        return WorkerInfo(
            worker_id=WorkerId(name),
            role=role,
            generation=generation,
            host="here",
            commands=port.commands,
            events=port.events,
            **more,
        )

    def _membership(self, info: WorkerInfo) -> Membership:
        return Membership(self.store, info, ttl_s=LEASE_S)

    async def _run(
        self,
        name: str,
        worker: Any,
        membership: Membership,
        engine: Engine | None,
        transfer: TransferEngine,
    ) -> None:
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
