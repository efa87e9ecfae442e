"""Blocks on their way from vLLM's cache to real kvstores and back, without vLLM."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_vllm.block_loader import BlockLoader
from halfmoon_vllm.block_storer import BlockStorer
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.connector_settings import read_connector_settings
from halfmoon_vllm.pool_connection import PoolConnection, open_pool
from halfmoon_vllm.step_capture import CapturedBlocks
from halfmoon_vllm.step_orders import LoadOrder
from tests.kvstore.conftest import Nodes

#: Blocks of 1 MiB: a staging memory of 4 MiB has four pages.
LAYOUT = KvLayout(
    model="m", n_layers=4, n_kv_heads=16, head_dim=128, dtype="float32", block_size=16
)
TOKENS = tuple(range(160))
HASHES = block_hashes(TOKENS, model="m", block_size=16)


@pytest.fixture
def nodes(metadata_url: str, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(metadata_url, tmp_path)
    yield nodes
    nodes.stop()


@dataclass
class Server:
    """What a server has beside vLLM: its connections and a cache of keys and values."""

    pool: PoolConnection
    counts: ConnectorCounts
    storer: BlockStorer
    loader: BlockLoader = field(init=False)
    #: By layer, side and slot.
    cache: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)

    def write_cache(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
            self.cache[layer, "key", slot] = key
            self.cache[layer, "value", slot] = value

    async def store(self, blocks: range, home: KvstoreAddress) -> None:
        """Store blocks of the prompt, as many at a time as there are pages for stores."""
        for block in blocks:
            page = self.pool.staging.take_for_store()
            assert page is not None
            size = LAYOUT.block_bytes
            self.pool.staging.memory.view[page * size : (page + 1) * size] = content(block)
            parent = HASHES[block - 1] if block else None
            tokens = TOKENS[block * 16 : (block + 1) * 16]
            await self.storer.store(CapturedBlocks((HASHES[block],), parent, tokens, (page,), home))

    async def load(self, *sources: KvstoreAddress, n: int = 10) -> int:
        """Load blocks to the slots from 1600 on; check those that came."""
        places = tuple(range(100, 100 + n))
        n_loaded = await self.loader.load(LoadOrder("r", tuple(HASHES[:n]), places, sources))
        for block in range(n_loaded):
            rows = torch.frombuffer(bytearray(content(block)), dtype=torch.float32)
            rows = rows.view(LAYOUT.n_layers, 2, 16, LAYOUT.n_kv_heads, LAYOUT.head_dim)
            for layer in range(LAYOUT.n_layers):
                for i, side in enumerate(("key", "value")):
                    got = [self.cache[layer, side, (100 + block) * 16 + s] for s in range(16)]
                    assert torch.equal(torch.stack(got), rows[layer, i])
        self.pool.staging.check()
        assert self.pool.staging.n_free == self.pool.staging.n_pages
        return n_loaded


def content(block: int) -> bytes:
    """The bytes of a block of the prompt."""
    n_floats = LAYOUT.block_bytes // 4
    return (torch.arange(n_floats, dtype=torch.float32) * (block + 1)).numpy().tobytes()


@asynccontextmanager
async def server(
    nodes: Nodes, load_timeout_s: float = 30.0, **more: object
) -> AsyncIterator[Server]:
    extra = {"metadata": nodes.metadata_url, "staging_mib": 4, **more}
    settings = read_connector_settings(extra)
    counts = ConnectorCounts()
    async with open_pool(settings, LAYOUT) as pool:
        it = Server(pool, counts, BlockStorer(pool, counts, ""))
        it.loader = BlockLoader(
            pool, it.write_cache, counts, read_s=10.0, load_timeout_s=load_timeout_s
        )
        yield it
        it.loader.close()


def address(nodes: Nodes, name: str) -> KvstoreAddress:
    info = nodes.info(name)
    return KvstoreAddress(info.worker_id, info.generation, info.commands)


async def held(nodes: Nodes, name: str) -> set[BlockHash]:
    async with nodes.client(name) as it:
        return await it.stored()


async def test_what_one_server_stored_another_loads_in_parts_of_its_memory(nodes: Nodes) -> None:
    nodes.start("a", capacity_mib=32)
    a = address(nodes, "a")
    async with server(nodes) as one, server(nodes) as other:
        await one.store(range(10), a)
        assert await held(nodes, "a") == set(HASHES)
        assert one.counts.take()["blocks_stored"] == 10
        assert await other.load(a) == 10
        counts = other.counts.take()
        assert counts["blocks_loaded"] == 10
        assert counts["bytes_loaded"] == 10 * LAYOUT.block_bytes
        # What is there is not written again.
        await other.store(range(10), a)
        assert "blocks_stored" not in other.counts.take()


async def test_a_damaged_block_leaves_and_ends_the_prefix_unless_the_next_has_it(
    nodes: Nodes,
) -> None:
    nodes.start("a", capacity_mib=32)
    nodes.start("b", capacity_mib=32)
    a, b = address(nodes, "a"), address(nodes, "b")
    async with server(nodes) as it:
        await it.store(range(10), a)
        await it.store(range(10), b)
        async with nodes.client("a") as damaging:
            await damaging.damage(HASHES[6:7])
        assert await it.load(a) == 6
        assert it.counts.take()["blocks_corrupt"] == 1
        while HASHES[6] in await held(nodes, "a"):
            pass  # it looks at the block again, and evicts it
        assert await it.load(a, b) == 10


async def test_a_killed_kvstore_costs_its_blocks_unless_another_one_has_them(nodes: Nodes) -> None:
    nodes.start("a", capacity_mib=32)
    nodes.start("b", capacity_mib=32)
    a, b = address(nodes, "a"), address(nodes, "b")
    async with server(nodes) as it:
        await it.store(range(10), a)
        await it.store(range(4), b)
        async with nodes.client("a") as damaging:
            await damaging.damage(HASHES[2:3])
        assert await it.load(a, b) == 4, "one is damaged, and b has it"
        nodes.kill("a")
        assert await it.load(a) == 0
        assert await it.load(a, b) == 4
        it.counts.take()
        await it.store(range(4, 6), a)
        assert it.counts.take() == {"blocks_not_stored.kvstore": 2}
        assert it.pool.staging.n_free == it.pool.staging.n_pages


async def test_blocks_that_do_not_come_in_time_are_given_up(nodes: Nodes) -> None:
    nodes.start("a", capacity_mib=32)
    a = address(nodes, "a")
    async with server(nodes, load_timeout_s=0.2) as it:
        await it.store(range(4), a)
        taken = it.pool.staging.take_for_load(4)
        order = LoadOrder("r", tuple(HASHES[:4]), (100, 101, 102, 103), (a,))
        assert await it.loader.load(order) == 0
        it.pool.staging.give_back(taken)
        assert it.counts.take()["blocks_not_loaded"] == 4


async def test_a_kvstore_of_another_layout_refuses(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.start("a", capacity_mib=32)
    async with nodes.client("a") as other:
        await other.put([BlockHash(b"x" * 16)])
    a = address(nodes, "a")
    async with server(nodes) as it:
        await it.store(range(2), a)
        assert it.counts.take() == {"blocks_not_stored.kvstore": 2}
        assert await it.load(a, n=2) == 0
    lines = [r.getMessage() for r in caplog.records if "not stored" in r.getMessage()]
    assert len(lines) == 1 and "layouts differ" in lines[0]


async def test_over_a_wire_only_servers_with_the_cluster_key_store_and_load(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "0123456789abcdef-of-this-test")
    nodes.start("a", capacity_mib=32, transfer_backends="tcp")
    a = address(nodes, "a")
    async with server(nodes, transfer_backends="tcp") as it:
        await it.store(range(4), a)
        assert await it.load(a, n=4) == 4
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY")
    async with server(nodes, transfer_backends="tcp") as other:
        assert await other.load(a, n=4) == 0
        await other.store(range(4, 5), a)
        assert other.counts.take()["blocks_not_stored.kvstore"] == 1
