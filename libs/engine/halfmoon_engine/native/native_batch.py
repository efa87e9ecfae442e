"""Give a batch of runs to the native extension."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfmoon_engine.interface import Run
from halfmoon_protocol.kv_layout import KvLayout


def open_native_pool(native: Any, memory: memoryview, layout: KvLayout) -> Any:
    """Return the extension's view of a pool's memory."""
    return native.Pool(
        memory,
        layout.dtype,
        layout.n_layers,
        layout.block_size,
        layout.n_kv_heads,
        layout.head_dim,
    )


def native_batch(native: Any, pool: Any, runs: Sequence[Run]) -> Any:
    """Return the extension's form of a batch.

    Raises:
        ValueError: a page that is not in the pool, or positions beyond a run's pages.
    """
    lengths = np.fromiter((len(run.token_ids) for run in runs), np.int64, len(runs))
    starts = np.fromiter((run.start for run in runs), np.int64, len(runs))
    n_pages = np.fromiter((len(run.pages) for run in runs), np.int64, len(runs))
    pages = native.join_pages([run.pages for run in runs], pool.n_pages)
    return native.Batch(pool, lengths, starts, n_pages, pages)
