"""Check a batch before an engine touches the pool."""

from collections.abc import Sequence

from halfmoon_engine.interface import Run
from halfmoon_protocol.kv_layout import KvLayout


def check_batch(
    runs: Sequence[Run], layout: KvLayout, n_pages: int | None, max_context: int
) -> None:
    """Refuse a batch that would read or write outside of its sequences' pages.

    Args:
        runs: the batch.
        layout: of the pool.
        n_pages: pages in the pool; None: the caller checks itself that each is in it.
        max_context: tokens of the longest sequence that the model allows.

    Raises:
        ValueError: naming the run by its place in the batch, the value and the limit.
    """
    for i, run in enumerate(runs):
        end = run.start + len(run.token_ids)
        if not run.token_ids or run.start < 0:
            raise ValueError(f"run {i} has {len(run.token_ids)} tokens from position {run.start}")
        if run.scoring is not None and not 0 < len(run.scoring.targets) <= len(run.token_ids):
            raise ValueError(
                f"run {i} has {len(run.token_ids)} tokens and {len(run.scoring.targets)} to score"
            )
        if end > max_context:
            raise ValueError(f"run {i} ends at {end} tokens, the model allows {max_context}")
        if len(run.pages) * layout.block_size < end:
            raise ValueError(
                f"run {i} ends at {end} tokens, its {len(run.pages)} pages "
                f"hold {len(run.pages) * layout.block_size}"
            )
        if n_pages is not None and (min(run.pages) < 0 or max(run.pages) >= n_pages):
            raise ValueError(f"run {i} names page {max(run.pages)}, the pool has {n_pages}")


def check_pool(pool: memoryview, layout: KvLayout) -> int:
    """Return the number of pages in `pool`.

    Raises:
        ValueError: not even one, or the memory can't be written.
    """
    if pool.readonly:
        raise ValueError("the pool is read-only memory; an engine writes its KV there")
    n_pages = pool.nbytes // layout.block_bytes
    if n_pages == 0:
        raise ValueError(f"a pool of {pool.nbytes} bytes holds no page of {layout.block_bytes}")
    return n_pages
