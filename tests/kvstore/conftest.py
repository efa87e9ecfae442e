"""Kvstore nodes as real processes: started, killed, started again."""

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
import xxhash

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata import open_store
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_scheduling.tiers.disk_map import BlockRecord
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, block_content

READY_WITHIN_S = 60.0


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
        self.n_clients += 1
        info = self.info(name)
        store = open_store(self.metadata_url)
        network = ZmqNetwork()
        try:
            async with await BlockClient.dial(
                network, store, info, f"client-{self.n_clients}"
            ) as client:
                yield client
        finally:
            await network.close()
            store.close()

    def stop(self) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def nodes(metadata_url: str, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(metadata_url, tmp_path)
    yield nodes
    nodes.stop()
