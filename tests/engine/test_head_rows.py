"""Rows of heads in a pool, in memory of the host or in a tensor of a device."""

import pytest
import torch

from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_vllm.head_rows import HeadRows

LAYOUT = KvLayout(model="m", n_layers=2, n_kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)
N_PAGES = 3


def test_a_tensor_is_a_pool_of_the_same_bytes_as_memory_of_the_host() -> None:
    on_host = bytearray(N_PAGES * LAYOUT.block_bytes)
    on_device = torch.zeros(N_PAGES * LAYOUT.block_bytes + 7, dtype=torch.uint8)
    pools = [HeadRows(memory, LAYOUT, 1, 2) for memory in (memoryview(on_host), on_device)]
    assert [pool.n_pages for pool in pools] == [N_PAGES, N_PAGES]
    rows = torch.tensor([0, 5, 2 * LAYOUT.n_layers * 2 * LAYOUT.block_size + 3])
    keys = torch.arange(48, dtype=torch.bfloat16).view(3, 2, 8)
    for pool in pools:
        assert pool.device == torch.device("cpu")
        pool.write(1, rows, keys, -keys)
        read = pool.read(1, rows)
        assert torch.equal(read[0], keys) and torch.equal(read[1], -keys)
    assert bytes(on_device[: len(on_host)].numpy()) == bytes(on_host)
    assert any(on_host)


def test_a_tensor_without_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match=f"holds no page of {LAYOUT.block_bytes}"):
        HeadRows(torch.zeros(LAYOUT.block_bytes - 1, dtype=torch.uint8), LAYOUT, 0, 4)
