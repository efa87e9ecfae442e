"""Live nodes, a real Redis, and everything that can happen to them."""

import asyncio
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata import open_store
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_testing.kvstore_soak.soak import KvstoreSoak
from tests.e2e.redis_server import RedisServer

pytestmark = pytest.mark.e2e

#: Set to how many operations the long version is to do; HALFMOON_SOAK_SEED to repeat one.
N_OPERATIONS = int(os.environ.get("HALFMOON_SOAK_OPERATIONS") or 0)
SEED = int(os.environ.get("HALFMOON_SOAK_SEED") or 0) or random.SystemRandom().randrange(1 << 32)
#: On a busy machine a reader may have to wait, and is to get everything nevertheless.
FLAGS = {
    "capacity_mib": 1, "disk_mib": 8, "promotion_wait_s": 60, "lease_ttl_s": 5,
    "reservation_ttl_s": 5,
}  # fmt: skip
#: Growth of a node's memory that is not taken for a leak: allocators keep some.
MOST_GROWTH_MIB = 32
#: Connections to the two nodes that it may copy from, and to the metadata server.
MORE_FILES = 16


@dataclass
class Hosts:
    """The processes of a soak, as `KvstoreProcesses` wants them."""

    nodes: Any
    folder: Path
    redis: RedisServer
    names: Sequence[str] = ("a", "b", "c")
    #: Where each node answers operators.
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> None:
        self.ports[name] = free_port()
        disk = self.folder / "disks" / name
        self.nodes.start(name, **FLAGS, disk_path=disk, metrics_port=self.ports[name])

    def kill(self, name: str) -> None:
        self.nodes.kill(name)

    def pause(self, name: str) -> None:
        self.nodes.processes[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.nodes.processes[name].signal(signal.SIGCONT)

    def fill_disk(self, name: str) -> None:
        """No writes beyond the first MiB of a file: as on a full disk, they give an error."""
        self._limit_files(name, 1 << 20)

    def free_disk(self, name: str) -> None:
        self._limit_files(name, resource.RLIM_INFINITY)

    def _limit_files(self, name: str, n_bytes: int) -> None:
        pid = self.nodes.processes[name].pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, hard))

    def disk_is_off(self, name: str) -> bool:
        return self._metric(name, "halfmoon_kvstore_disk_off") == 1

    def pin(self, name: str, block: BlockHash, kind: str, ttl_s: float) -> bool:
        wanted = {"hash": block.hex(), "kind": kind, "ttl_s": ttl_s}
        url = f"http://127.0.0.1:{self.ports[name]}/pin"
        try:
            return httpx.post(url, json=wanted, timeout=10).is_success
        except httpx.HTTPError:
            return False

    def n_pinned(self, name: str) -> int:
        kinds = ("soft", "hard", "held")
        metric = "halfmoon_kvstore_pinned_blocks"
        return sum(int(self._metric(name, f'{metric}{{kind="{kind}"}}')) for kind in kinds)

    def _metric(self, name: str, metric: str) -> float:
        """As of now; 0 from a node that does not know yet what a block is."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=10).text
        values = [row.split()[-1] for row in text.splitlines() if row.startswith(f"{metric} ")]
        return float(values[0]) if values else 0.0

    def segment(self, name: str) -> Path:
        return self.folder / "disks" / name / "segment-00000.kv"

    def stop_metadata(self) -> None:
        self.redis.kill()

    def start_metadata(self) -> None:
        self.redis.start()

    def rss_mib(self, name: str) -> float:
        status = Path(f"/proc/{self.nodes.processes[name].pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) / 1024

    def files(self, name: str) -> Counter[str]:
        """What a node has open, by kind."""
        kinds: Counter[str] = Counter()
        for each in Path(f"/proc/{self.nodes.processes[name].pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                kinds[str(each.readlink()).split("[")[0]] += 1
        return kinds


@pytest.fixture
def hosts(nodes: Any, tmp_path: Path) -> Iterator[Hosts]:
    redis = RedisServer(tmp_path)
    nodes.metadata_url = redis.url
    try:
        yield Hosts(nodes, tmp_path, redis)
    finally:
        nodes.stop()
        nodes.processes.clear()
        redis.kill()


@contextmanager
def soaking(hosts: Hosts, seed: int) -> Iterator[KvstoreSoak]:
    store = open_store(hosts.redis.url)
    try:
        for name in hosts.names:
            hosts.start(name)
        yield KvstoreSoak(hosts, ZmqNetwork(), store, seed)
    finally:
        store.close()


async def test_whatever_happens_to_its_nodes_a_pool_keeps_its_promises(hosts: Hosts) -> None:
    """No wrong byte, nothing lost that is owed, nothing held for ever, and no memory leaked."""
    print(f"HALFMOON_SOAK_SEED={SEED}")
    n_operations, n_between = (N_OPERATIONS, 45) if N_OPERATIONS else (280, 20)
    with soaking(hosts, SEED) as soak:
        await soak.run(n_operations * 3 // 4, n_between)
        files = {name: hosts.files(name) for name in hosts.names}
        rss_mib = {name: hosts.rss_mib(name) for name in hosts.names}
        print(await soak.run(n_operations // 4, n_between, kills=False))
        deadline = time.monotonic() + 30
        for name in hosts.names:
            # The connections of clients that are gone have to be noticed.
            most = files[name].total() + MORE_FILES
            while (now := hosts.files(name)).total() > most and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            now_mib = hosts.rss_mib(name)
            print(f"{name}: {rss_mib[name]:.0f} → {now_mib:.0f} MiB, {now.total()} files")
            assert now.total() <= most, f"{name} keeps open {now - files[name]}"
            assert now_mib < rss_mib[name] + MOST_GROWTH_MIB, f"{name} keeps memory"
