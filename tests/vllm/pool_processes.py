"""A metadata server and kvstores as processes, which a test can kill and start again."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata import open_store
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.membership import MEMBERS
from halfmoon_testing.block_client import BlockClient
from tests.e2e.redis_server import RedisServer

READY_S = 120.0


_BLOCKS = "halfmoon_kvstore_blocks"


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not in {limit_s} s: {what}"
        time.sleep(0.05)


class PoolProcesses:
    """Redis and kvstores of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis = RedisServer(folder)
        self.metadata = self.redis.url
        self._kvstores: dict[str, ServiceProcess] = {}
        self._ports: dict[str, int] = {}

    def start_kvstore(self, name: str, **flags: object) -> None:
        port = self._ports[name] = free_port()
        values = {
            "metrics_port": port,
            "capacity_mib": 64,
            "lease_ttl_s": 3.0,
            "reservation_ttl_s": 4.0,
            **flags,
        }
        words = ["--worker-id", name, "--metadata", self.metadata]
        for flag, value in values.items():
            words += [f"--{flag.replace('_', '-')}", str(value)]
        spec = ProcessSpec(name, "kvstore", tuple(words))
        process = self._kvstores[name] = ServiceProcess(spec, self.folder)

        def is_ready() -> bool:
            assert process.exit_code is None, "\n".join(process.last_lines(30))
            return process.stage == "ready"

        wait_until(is_ready, f"{name} is ready", READY_S)

    def kill_kvstore(self, name: str) -> None:
        process = self._kvstores.pop(name)
        process.signal(signal.SIGKILL)
        assert process.wait(10)

    def freeze_kvstore(self, name: str) -> None:
        self._kvstores[name].signal(signal.SIGSTOP)

    def thaw_kvstore(self, name: str) -> None:
        self._kvstores[name].signal(signal.SIGCONT)

    def info(self, name: str) -> WorkerInfo:
        store = open_store(self.metadata)
        try:
            record = store.get(MEMBERS + name)
        finally:
            store.close()
        assert record is not None
        return msgspec.json.decode(record, type=WorkerInfo)

    @asynccontextmanager
    async def client(self, name: str) -> AsyncIterator[BlockClient]:
        """A client with the layout of what the kvstore holds."""
        info, store, network = self.info(name), open_store(self.metadata), ZmqNetwork()
        assert info.layout is not None
        try:
            own = f"client-{os.urandom(4).hex()}"
            async with await BlockClient.dial(network, store, info, own, info.layout) as client:
                yield client
        finally:
            await network.close()
            store.close()

    def metric(self, kvstore: str, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels, and perhaps others."""
        url = f"http://127.0.0.1:{self._ports[kvstore]}/metrics"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(sample.rsplit(" ", 1)[1])
            for sample in httpx.get(url, timeout=30, trust_env=False).text.splitlines()
            if sample.startswith((f"{name} ", f"{name}{{")) and all(w in sample for w in wanted)
        )

    def n_stored(self, kvstore: str) -> int:
        return int(self.metric(kvstore, _BLOCKS, state="stored", tier="memory"))

    def n_held(self, kvstore: str) -> int:
        """Blocks that are reserved or leased."""
        reserved = self.metric(kvstore, _BLOCKS, state="reserved", tier="memory")
        return int(reserved + self.metric(kvstore, "halfmoon_kvstore_leased_blocks"))

    def stop(self) -> None:
        for name in list(self._kvstores):
            self.kill_kvstore(name)
        self.redis.kill()
