"""Stock vLLM servers whose connectors share one pool of processes, which a test can kill."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.processes.vllm_server import VllmServer
from tests.e2e.redis_server import RedisServer
from tests.kvstore.conftest import Nodes
from tests.vllm.conftest import BLOCK_SIZE

FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")
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


@dataclass
class Fleet:
    """Servers over one pool."""

    folder: Path
    pool: PoolProcesses
    model: Path
    servers: list[VllmServer] = field(default_factory=list)

    def start(self, *flags: str, vllm_block: int = BLOCK_SIZE, **settings: object) -> VllmServer:
        log = self.folder / f"server-{len(self.servers)}.log"
        extra = {"metadata": self.pool.metadata_url, "staging_mib": 16, **settings}
        more = ("--block-size", str(vllm_block), *flags)
        server = VllmServer(self.model, free_port(), log, *FLAGS, *more, connector=extra)
        self.servers.append(server)
        return server

    def stored(self, server: VllmServer, prompt: list[int], **fields: object) -> list[int]:
        """Complete a prompt, and wait until its full blocks are at the kvstore."""
        before = self.pool.n_stored("kvstore-0")
        tokens = server.tokens(prompt, 8, **fields)
        n_blocks = len(prompt) // BLOCK_SIZE
        wait_until(
            lambda: self.pool.n_stored("kvstore-0") >= before + n_blocks, f"{n_blocks} stored"
        )
        return tokens


def cached_tokens(server: VllmServer, prompt: list[int], **fields: object) -> int:
    answer = server.complete(prompt, 1, **fields)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
