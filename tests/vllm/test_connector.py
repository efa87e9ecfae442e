"""Two stock vLLM servers share the pool: hits, the same tokens, salts, metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.models.tiny_models import make_tiny_model
from halfmoon_testing.processes.vllm_server import VllmServer
from tests.vllm.conftest import ARCHITECTURES, BLOCK_SIZE, prompt_of
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
        extra = {"metadata": self.pool.metadata, "staging_mib": 16, **settings}
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


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers and a kvstore."""
    folder = tmp_path_factory.mktemp("fleet")
    model = make_tiny_model("llama", folder / "llama", 1, ARCHITECTURES["llama"])
    pool = PoolProcesses(folder)
    fleet = Fleet(folder, pool, model)
    try:
        pool.start_kvstore("kvstore-0")
        # The second one has larger blocks than the pool.
        for server in [
            fleet.start(),
            fleet.start(vllm_block=2 * BLOCK_SIZE, block_size=BLOCK_SIZE),
        ]:
            server.wait_until_ready()
        yield fleet
    finally:
        for server in fleet.servers:
            server.stop()
        pool.stop()


def test_a_prompt_of_one_server_is_a_hit_at_the_other_with_the_same_tokens(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    prompt = prompt_of(200, seed=1)
    expected = fleet.stored(first, prompt)
    answer = second.complete(prompt, 8)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert second.metric("vllm:external_prefix_cache_hits_total") >= 192
    # What was loaded is right: a prompt that goes on behind it continues the same way.
    longer = [*prompt, *expected]
    assert second.tokens(longer, 8) == first.tokens(longer, 8)


def test_hits_of_salted_requests_are_only_within_their_salt(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    prompt = prompt_of(200, seed=2)
    expected = fleet.stored(first, prompt, cache_salt="ours")
    assert cached_tokens(second, prompt, cache_salt="theirs") == 0
    assert cached_tokens(second, prompt) == 0
    answer = second.complete(prompt, 8, cache_salt="ours")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert answer["choices"][0]["token_ids"] == expected
