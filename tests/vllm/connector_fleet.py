"""Stock vLLM servers whose connectors share one pool."""

from dataclasses import dataclass, field
from pathlib import Path

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.processes.vllm_server import VllmServer
from tests.vllm.conftest import BLOCK_SIZE
from tests.vllm.pool_processes import PoolProcesses, wait_until

FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8")


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
