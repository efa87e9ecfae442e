"""Plan a batch as arrays: which slot of which page each token is read from or written to.

A slot is ``page * block_size + place in the page``, as vLLM counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.interface import Run

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PagedBatch:
    """One forward pass over pages."""

    #: [n_tokens] of all runs, one run after the other.
    tokens: Ints
    #: [n_tokens]
    positions: Ints
    #: [n_tokens] where each token's KV is written.
    slots: Ints
    #: [n_runs] tokens of each run.
    lengths: Ints
    #: [n_runs] positions of each run's sequence when the pass is over.
    ends: Ints
    #: [n_runs, most pages of a run], padded with page 0.
    pages: NDArray[np.int32]
    #: [n_rows] places in `tokens` whose logits are wanted.
    rows: Ints
    #: Slots that other processes may have written since they were last read.
    read_slots: Ints
    #: Pages that this pass fills from their first slot on, but not to their last: what others left
    #: in the rest is still there.
    part_filled_pages: Ints


def plan_batch(runs: Sequence[Run], tokens: Ints, rows: Ints, block_size: int) -> PagedBatch:
    """Lay out a checked batch.

    Args:
        runs: at least one.
        tokens: of all runs, one run after the other.
        rows: places in `tokens` whose logits are wanted.
        block_size: tokens of a page.
    """
    lengths = np.array([len(run.token_ids) for run in runs], dtype=np.int64)
    starts = np.array([run.start for run in runs], dtype=np.int64)
    ends = starts + lengths
    n_pages = -(-ends // block_size)
    pages = np.zeros((len(runs), int(n_pages.max())), dtype=np.int32)
    for i, run in enumerate(runs):
        pages[i, : n_pages[i]] = run.pages[: n_pages[i]]
    of_run = np.repeat(np.arange(len(runs)), lengths)
    first_rows = np.cumsum(lengths) - lengths
    positions = np.arange(len(tokens), dtype=np.int64) + (starts - first_rows)[of_run]
    slots = _slots(pages, of_run, positions, block_size)
    # A run that goes on where this engine left off has its pages mirrored already.
    mirrored = np.array([run.start if run.continues else 0 for run in runs], dtype=np.int64)
    unread = starts - mirrored
    of_read = np.repeat(np.arange(len(runs)), unread)
    first_read = np.cumsum(unread) - unread
    read = np.arange(int(unread.sum()), dtype=np.int64) - first_read[of_read]
    last_page_starts = (n_pages - 1) * block_size
    part_filled = (mirrored <= last_page_starts) & (ends % block_size != 0)
    return PagedBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        lengths=lengths,
        ends=ends,
        pages=pages,
        rows=rows,
        read_slots=_slots(pages, of_read, read, block_size),
        part_filled_pages=pages[part_filled, n_pages[part_filled] - 1].astype(np.int64),
    )


def _slots(pages: NDArray[np.int32], of_run: Ints, positions: Ints, block_size: int) -> Ints:
    page = pages[of_run, positions // block_size].astype(np.int64)
    return page * block_size + positions % block_size
