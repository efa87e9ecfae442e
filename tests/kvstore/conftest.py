"""Kvstore nodes: as real processes, started and killed, or one in this process."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import xxhash

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_kvstore.build_kvstore import build_kvstore
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_metadata import MemoryStore, open_store
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.channels.memory_network import MemoryNetwork, MemoryPort
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.membership import MEMBERS
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.worker_env import open_env
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, block_content
from halfmoon_transfer.engine import TransferEngine

#: On a machine that is busy with vLLM, too.
READY_WITHIN_S = 120.0


def block(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def content(i: int, n_bytes: int = SMALL_LAYOUT.block_bytes) -> memoryview:
    """The bytes of block i."""
    return memoryview(bytearray(block_content(block(i), n_bytes)))


def record(i: int, n_bytes: int = SMALL_LAYOUT.block_bytes) -> BlockRecord:
    """Of block i, which follows block i - 1."""
    checksum = xxhash.xxh3_64_intdigest(content(i, n_bytes))
    return BlockRecord(block(i), block(i - 1) if i else None, i, checksum)


@dataclass
class Nodes:
    """Kvstores of one metadata server, by name."""

    metadata_url: str
    folder: Path
    processes: dict[str, ServiceProcess] = field(default_factory=dict)
    n_clients: int = 0

    def start(self, name: str, **flags: object) -> None:
        """Start a node and wait until it is ready."""
        words = ["--worker-id", name, "--metadata", self.metadata_url]
        for flag, value in {"metrics_port": -1, **flags}.items():
            words += [f"--{flag.replace('_', '-')}", str(value)]
        self.processes[name] = process = ServiceProcess(
            ProcessSpec(name, "kvstore", tuple(words)), self.folder
        )
        deadline = time.monotonic() + READY_WITHIN_S
        while process.stage != "ready":
            assert process.exit_code is None and time.monotonic() < deadline, self.log(name)
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.signal(signal.SIGKILL)
        assert process.wait(10)

    def log(self, name: str) -> str:
        return "\n".join(self.processes[name].last_lines(30))

    def info(self, name: str) -> WorkerInfo:
        """As it is registered now."""
        store = open_store(self.metadata_url)
        try:
            record = store.get(MEMBERS + name)
        finally:
            store.close()
        assert record is not None
        return msgspec.json.decode(record, type=WorkerInfo)

    def http(self, name: str) -> httpx.AsyncClient:
        """A client of what it serves to operators."""
        url = self.info(name).http
        assert url
        return httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[BlockClient]:
        """A client that knows blocks of the node's layout, or small ones."""
        self.n_clients += 1
        info = self.info(name)
        store = open_store(self.metadata_url)
        network = ZmqNetwork()
        try:
            own, layout = f"client-{self.n_clients}", info.layout or SMALL_LAYOUT
            async with await BlockClient.dial(network, store, info, own, layout) as client:
                yield client
        finally:
            await network.close()
            store.close()

    def stop(self) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGKILL)
            process.wait(10)


@dataclass
class Node:
    """A kvstore of 1 MiB in this process, over the memory network."""

    worker: KvstoreWorker
    task: "asyncio.Task[None]"
    port: MemoryPort
    clock: Any
    network: MemoryNetwork
    store: MemoryStore
    #: Closed with it.
    engines: list[TransferEngine]


@asynccontextmanager
async def open_node(
    clock: Clock,
    disk: SegmentFolder | None = None,
    tracer: Tracer | None = None,
    model: WorkerInfo | None = None,
    **settings: Any,
) -> AsyncIterator[Node]:
    """Start one; `model` is the worker whose KV it stores."""
    network, store = MemoryNetwork(), MemoryStore()
    config = KvstoreSettings(worker_id="kvstore-0", capacity_mib=1, **settings)

    async def open_transfer(generation: int) -> TransferEngine:
        return TransferEngine.open(
            "kvstore-0", metadata=store, generation=generation, backends=("memory",)
        )

    env = await open_env(
        WorkerId("kvstore-0"), "kvstore", store, network, open_transfer, host_id="here", clock=clock
    )
    if model is not None:
        store.put(MEMBERS + model.worker_id, msgspec.json.encode(model))
    memory = env.transfer.allocate(config.capacity_bytes)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(network.close)
        worker = build_kvstore(env, memory, disk, config, stack, tracer).worker
        task = asyncio.create_task(worker.serve())
        node = Node(worker, task, env.port, clock, network, store, [env.transfer])  # type: ignore[arg-type]
        try:
            yield node
        finally:
            task.cancel()
            await asyncio.wait([task])
            for engine in node.engines:
                engine.close()


@pytest.fixture
def nodes(metadata_url: str, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(metadata_url, tmp_path)
    yield nodes
    nodes.stop()
