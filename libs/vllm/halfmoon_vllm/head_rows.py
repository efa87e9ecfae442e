"""View a pool's memory as rows of one token's keys, or values, of some heads."""

import torch

from halfmoon_engine.attention.kv_pool import HostKvPool
from halfmoon_protocol.kv_layout import KvLayout


class HeadRows:
    """Rows of neighbouring KV heads in attached memory, in the order of `HostKvPool`."""

    def __init__(self, memory: memoryview, layout: KvLayout, first_head: int, n_heads: int) -> None:
        """View the heads ``first_head … first_head + n_heads - 1`` of each token."""
        pool = HostKvPool(memory, layout)
        self.n_pages = pool.n_pages
        self._block_size = layout.block_size
        heads = pool.rows.view(-1, layout.n_kv_heads, layout.head_dim)
        self._rows = heads[:, first_head : first_head + n_heads]

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values at base rows, each [n, n_heads, head_dim]."""
        keys = rows + 2 * layer * self._block_size
        return self._rows[keys], self._rows[keys + self._block_size]

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values, each [n, n_heads, head_dim]."""
        key_rows = rows + 2 * layer * self._block_size
        self._rows.index_copy_(0, key_rows, keys)
        self._rows.index_copy_(0, key_rows + self._block_size, values)
