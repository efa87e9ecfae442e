"""View the pool's memory as tensors: rows of one token's keys, or values, of one layer.

    row(page, layer, side, slot) = ((page·n_layers + layer)·2 + side)·block_size + slot

is the same order as `halfmoon_protocol.kv_layout` gives the bytes, so the host's pool is a view
of the attached memory and nothing is copied. A *base row* is a token's row at layer 0, side
0 (keys); its other rows lie at fixed distances from it.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.batch_checks import check_pool
from halfmoon_protocol.kv_layout import DType, KvLayout

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def base_rows(layout: KvLayout, pages: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Return the base rows of positions 0 … end-1 of the sequence on `pages`."""
    page_rows = layout.n_layers * 2 * layout.block_size
    slots = np.arange(layout.block_size, dtype=np.int64)
    rows = pages[: layout.blocks_for(end), None] * page_rows + slots
    return rows.reshape(-1)[:end]


class KvPool(Protocol):
    """Memory of keys and values, written and read by base rows, one layer at a time."""

    @property
    def n_pages(self) -> int:
        """Pages in the pool."""
        ...

    def fetch(self, layer: int, pages: torch.Tensor) -> None:
        """Copy pages that other processes have written to the attached memory."""
        ...

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values, each [n, n_kv_heads·head_dim], in the attached memory."""
        ...

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values at these rows, each [n, n_kv_heads·head_dim].

        They lie in scratch memory that the next `read` overwrites.
        """
        ...


class HostKvPool:
    """The attached memory itself, for models that compute on the host."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.n_pages = check_pool(memory, layout)
        self.layout = layout
        width = layout.n_kv_heads * layout.head_dim
        n_rows = self.n_pages * layout.n_layers * 2 * layout.block_size
        self.rows = torch.frombuffer(
            memory.cast("B"), dtype=TORCH_DTYPES[layout.dtype], count=n_rows * width
        ).view(n_rows, width)
        self._scratch = GatherBuffer(self.rows)

    def fetch(self, layer: int, pages: torch.Tensor) -> None:
        """Do nothing: other processes write into these very bytes."""

    def write(
        self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values in the attached memory."""
        write_rows(self.rows, self.layout, layer, rows, keys, values)

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values into scratch memory."""
        return self._scratch.gather(self.rows, self.layout, layer, rows)


class GatherBuffer:
    """Reused memory for gathered rows: fresh pages from the system cost more than the copy."""

    def __init__(self, like: torch.Tensor) -> None:
        self._keys = like.new_empty((0, like.shape[1]))
        self._values = like.new_empty((0, like.shape[1]))

    def gather(
        self, pool: torch.Tensor, layout: KvLayout, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather rows of one layer's keys and values."""
        n = rows.shape[0]
        if self._keys.shape[0] < n:
            capacity = n + n // 4
            self._keys = pool.new_empty((capacity, pool.shape[1]))
            self._values = pool.new_empty((capacity, pool.shape[1]))
        key_rows = rows + 2 * layer * layout.block_size
        keys, values = self._keys[:n], self._values[:n]
        torch.index_select(pool, 0, key_rows, out=keys)
        torch.index_select(pool, 0, key_rows + layout.block_size, out=values)
        return keys, values


def write_rows(
    pool: torch.Tensor,
    layout: KvLayout,
    layer: int,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Scatter one layer's keys and values into the rows of a pool."""
    key_rows = rows + 2 * layer * layout.block_size
    pool.index_copy_(0, key_rows, keys)
    pool.index_copy_(0, key_rows + layout.block_size, values)
