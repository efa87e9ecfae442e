"""Blocks are captured whole, or not at all; a pool's rows are the same in any memory."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_protocol.regions import Region
from halfmoon_transfer.regions.region_table import Memory
from halfmoon_vllm.block_staging import BlockStaging
from halfmoon_vllm.connector_counts import ConnectorCounts
from halfmoon_vllm.head_rows import HeadRows
from halfmoon_vllm.step_capture import StepCapture
from halfmoon_vllm.step_orders import StoreOrder

N_LAYERS = 2
LAYOUT = KvLayout(
    model="m", n_layers=N_LAYERS, n_kv_heads=2, head_dim=4, dtype="float32", block_size=16
)
HOME = KvstoreAddress(WorkerId("a"), 1, "tcp://a")


class Captured:
    """A capture over staging memory of a few pages."""

    def __init__(self, n_pages: int = 8) -> None:
        length = n_pages * LAYOUT.block_bytes
        view = memoryview(bytearray(length))
        self.staging = BlockStaging(Memory(Region("s", 1, b"k" * 16, length), view), LAYOUT)
        self.counts = ConnectorCounts()
        self.capture = StepCapture(self.staging, N_LAYERS, self.counts)

    def step(self, slots: Iterable[int], *orders: StoreOrder, layers: int = N_LAYERS) -> list[Any]:
        """Pass a row for each slot through the layers; its value tells slot and layer."""
        self.capture.begin_step(orders, ())
        self.pass_rows(list(slots), layers)
        return self.capture.end_step()

    def pass_rows(self, slots: list[int], layers: int = N_LAYERS) -> None:
        for layer in range(layers):
            rows = torch.tensor(slots, dtype=torch.float32)[:, None, None].expand(-1, 2, 4)
            self.capture.on_layer(layer, rows + 1000 * layer, -rows, torch.tensor(slots))
        self.capture.check()
        self.staging.check()

    def key(self, page: int, layer: int, slot: int) -> float:
        keys, values = self.staging.rows.read(
            layer, self.staging.base_rows(torch.tensor([page]), torch.tensor([slot]))
        )
        assert float(keys[0, 1, 3]) == 1000 * layer - float(values[0, 0, 0])
        return float(keys[0, 1, 3])


def order(*places: int, request: str = "r") -> StoreOrder:
    hashes = tuple(BlockHash(bytes([place]) * 16) for place in places)
    return StoreOrder(request, hashes, None, tuple(range(16 * len(places))), places, HOME)


def test_a_block_of_one_step_has_its_rows_in_the_canonical_order() -> None:
    it = Captured()
    (blocks,) = it.step([3, *range(80, 96), -1], order(5))
    assert blocks.hashes == order(5).hashes
    (page,) = blocks.pages
    for layer in range(N_LAYERS):
        assert [it.key(page, layer, slot) for slot in range(16)] == [
            1000 * layer + slot for slot in range(80, 96)
        ]


@hypothesis.given(cuts=st.lists(st.integers(1, 47), max_size=6), seed=st.randoms())
def test_blocks_computed_in_any_chunks_come_out_once_each(cuts: list[int], seed: object) -> None:
    it = Captured()
    places = (2, 6, 4)
    slots = [place * 16 + i for place in places for i in range(16)]
    edges = sorted({0, *cuts, 48})
    orders = [order(*places)]
    out = []
    for start, stop in pairwise(edges):
        out += it.step(slots[start:stop], *orders)
        orders.clear()
    assert [h for blocks in out for h in blocks.hashes] == list(order(*places).hashes)
    parents = [blocks.parent for blocks in out]
    assert parents[0] is None and None not in parents[1:]
    assert [t for blocks in out for t in blocks.token_ids] == list(range(48))


def test_a_block_of_a_request_that_ended_is_dropped_before_its_place_is_used_again() -> None:
    it = Captured()
    assert it.step(range(16, 24), order(1)) == []
    it.capture.begin_step((), ("r",))
    it.pass_rows(list(range(24, 32)))
    assert it.capture.end_step() == []
    assert it.staging.n_free == 8
    assert it.counts.take() == {"blocks_not_stored.request_ended": 1}


def test_a_step_in_which_a_layer_did_not_pass_stores_nothing() -> None:
    it = Captured()
    assert it.step(range(16, 32), order(1), layers=1) == []
    assert it.staging.n_free == 8
    assert it.counts.take() == {"blocks_not_stored.layers_differ": 1}


def test_full_staging_memory_leaves_blocks_and_what_follows_them_out() -> None:
    it = Captured(n_pages=4)  # of which stores take three
    (blocks,) = it.step(range(16, 96), order(1, 2, 3, 4), order(5, request="other"))
    assert blocks.hashes == order(1, 2, 3).hashes
    it.staging.give_back(list(blocks.pages))
    assert it.step(range(96, 112), order(6)) == [], "its prefix is not stored"
    assert it.counts.take() == {"blocks_not_stored.staging_full": 3}


@pytest.mark.parametrize("n_pages", [1, 2])
def test_the_smallest_staging_memory_serves_loads_and_stores(n_pages: int) -> None:
    staging = Captured(n_pages).staging
    page = staging.take_for_store()
    assert page is not None
    staging.give_back([page])
    assert len(staging.take_for_load(5)) == n_pages
    assert staging.take_for_store() is None
    assert staging.take_for_load(5) == []


HALVED = KvLayout(model="m", n_layers=2, n_kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)
N_PAGES = 3


def test_a_tensor_is_a_pool_of_the_same_bytes_as_memory_of_the_host() -> None:
    on_host = bytearray(N_PAGES * HALVED.block_bytes)
    on_device = torch.zeros(N_PAGES * HALVED.block_bytes + 7, dtype=torch.uint8)
    pools = [HeadRows(memory, HALVED, 1, 2) for memory in (memoryview(on_host), on_device)]
    assert [pool.n_pages for pool in pools] == [N_PAGES, N_PAGES]
    rows = torch.tensor([0, 5, 2 * HALVED.n_layers * 2 * HALVED.block_size + 3])
    keys = torch.arange(48, dtype=torch.bfloat16).view(3, 2, 8)
    for pool in pools:
        assert pool.device == torch.device("cpu")
        pool.write(1, rows, keys, -keys)
        read = pool.read(1, rows)
        assert torch.equal(read[0], keys) and torch.equal(read[1], -keys)
    assert bytes(on_device[: len(on_host)].numpy()) == bytes(on_host)
    assert any(on_host)


def test_a_tensor_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match=f"holds no page of {HALVED.block_bytes}"):
        HeadRows(torch.zeros(HALVED.block_bytes - 1, dtype=torch.uint8), HALVED, 0, 4)
