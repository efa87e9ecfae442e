"""View a pool's memory as rows of one token's keys, or values, of some heads."""

import torch

from halfmoon_engine.attention.kv_pool import TORCH_DTYPES, HostKvPool
from halfmoon_protocol.kv_layout import KvLayout


class HeadRows:
    """Rows of neighbouring KV heads in attached memory, in the order of `HostKvPool`."""

    def __init__(
        self,
        memory: memoryview | torch.Tensor,
        layout: KvLayout,
        first_head: int,
        n_heads: int,
    ) -> None:
        """View the heads ``first_head … first_head + n_heads - 1`` of each token.

        Args:
            memory: of the host, or a tensor of bytes on any device.
            layout: of the pages in it.
            first_head: index of the first head.
            n_heads: number of heads.

        Raises:
            ValueError: the memory holds no page, or is read-only.
        """
        if isinstance(memory, torch.Tensor):
            rows, self.n_pages = _device_rows(memory, layout)
        else:
            pool = HostKvPool(memory, layout)
            rows, self.n_pages = pool.rows, pool.n_pages
        #: Where the memory is.
        self.device = rows.device
        self._block_size = layout.block_size
        heads = rows.view(-1, layout.n_kv_heads, layout.head_dim)
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


def _device_rows(memory: torch.Tensor, layout: KvLayout) -> tuple[torch.Tensor, int]:
    n_pages = memory.nbytes // layout.block_bytes
    if n_pages == 0:
        raise ValueError(f"a pool of {memory.nbytes} bytes holds no page of {layout.block_bytes}")
    whole = memory.view(torch.uint8)[: n_pages * layout.block_bytes]
    return whole.view(TORCH_DTYPES[layout.dtype]), n_pages
