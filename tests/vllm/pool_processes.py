"""A metadata server and kvstores as processes, which a test can kill and start again."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.redis_server import RedisServer
from tests.kvstore.conftest import Nodes

_BLOCKS = "halfmoon_kvstore_blocks"


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not in {limit_s} s: {what}"
        time.sleep(0.05)


class PoolProcesses(Nodes):
    """Redis and kvstores of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.redis = RedisServer(folder)
        super().__init__(self.redis.url, folder)
        self._ports: dict[str, int] = {}

    def start_kvstore(self, name: str) -> None:
        port = self._ports[name] = free_port()
        self.start(name, metrics_port=port, capacity_mib=64, lease_ttl_s=3.0, reservation_ttl_s=4.0)

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
        super().stop()
        self.redis.kill()
