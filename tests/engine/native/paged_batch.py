"""A ragged batch over pages, and what its attention is in float64.

Memory of the pool, the queries and the results ends where an unreadable page begins, so that a
kernel that reads or writes beyond it ends the process.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfmoon_engine_native import _native

Floats = npt.NDArray[np.float32]

_libc = ctypes.CDLL(None, use_errno=True)


def guarded(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of n bytes whose end is followed by a page without access."""
    whole = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = mmap.mmap(-1, whole + mmap.PAGESIZE)
    memory: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
    address = ctypes.c_void_p(memory.ctypes.data + whole)
    if _libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory[whole - n_bytes : whole]


def guarded_floats(values: Floats) -> Floats:
    """Copy an array into such memory."""
    copy = guarded(values.nbytes).view(np.float32).reshape(values.shape)
    copy[...] = values
    return copy


def to_stored(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Round as a pool does: to nearest, ties to even; bfloat16 as its bits."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_stored(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return stored.astype(np.float64)


STORED = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch; runs are (tokens before, new tokens)."""

    runs: Sequence[tuple[int, int]]
    dtype: str = "float32"
    head_dim: int = 64
    n_kv_heads: int = 2
    n_shared: int = 2
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    n_layers: int = 2
    layer: int = 1

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.n_shared

    @property
    def n_tokens(self) -> int:
        return sum(n for _, n in self.runs)


class PagedBatch:
    """Runs on pages in random order; all that is not theirs is NaN."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        self.counts = [-(-(before + n) // shape.block_size) for before, n in shape.runs]
        n_pages = sum(self.counts) + 2
        stored = np.dtype(STORED[shape.dtype])
        sizes = (n_pages, shape.n_layers, 2, shape.block_size, shape.n_kv_heads, shape.head_dim)
        memory = guarded(int(np.prod(sizes)) * stored.itemsize)
        memory[...] = 0xFF
        self.pages = memory.view(stored).reshape(sizes)
        self.pool = _native.Pool(
            memory, shape.dtype, shape.n_layers, shape.block_size, shape.n_kv_heads, shape.head_dim
        )
        # The last page is in use: its end is the memory's end.
        order = rng.permutation(n_pages - 1)[: sum(self.counts)].astype(np.int32)
        order[-1] = n_pages - 1
        self.order = order
        lengths, starts = [n for _, n in shape.runs], [before for before, _ in shape.runs]
        columns = [np.array(each, np.int64) for each in (lengths, starts, self.counts)]
        self.batch = _native.Batch(self.pool, columns[0], columns[1], columns[2], order)
        width = (shape.n_kv_heads, shape.head_dim)
        self.queries = guarded_floats(
            rng.standard_normal((shape.n_tokens, shape.n_heads, shape.head_dim), np.float32)
        )
        self.keys = [rng.standard_normal((s + n, *width), np.float32) for s, n in shape.runs]
        self.values = [rng.standard_normal((s + n, *width), np.float32) for s, n in shape.runs]
        self.sinks = rng.standard_normal(shape.n_heads, np.float32) if shape.sinks else None
        self._store_earlier_tokens()

    def _slots(self, run: int, start: int, end: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        first = sum(self.counts[:run])
        positions = np.arange(start, end)
        pages = self.order[first + positions // self.shape.block_size]
        return pages, positions % self.shape.block_size

    def _store_earlier_tokens(self) -> None:
        for i, (before, _) in enumerate(self.shape.runs):
            pages, slots = self._slots(i, 0, before)
            for side, rows in enumerate((self.keys[i], self.values[i])):
                stored = to_stored(rows[:before], self.shape.dtype)
                self.pages[pages, self.shape.layer, side, slots] = stored

    def write(self) -> None:
        """Write the runs' new tokens with the kernel."""
        new = [
            np.concatenate(
                [rows[before:] for rows, (before, _) in zip(side, self.shape.runs, strict=True)]
            )
            for side in (self.keys, self.values)
        ]
        _native.write_kv(self.batch, self.shape.layer, *map(guarded_floats, new))

    def attend(self) -> Floats:
        out = guarded(self.queries.nbytes).view(np.float32).reshape(self.queries.shape)
        out[...] = np.nan
        shape = self.shape
        form = (shape.n_heads, shape.head_dim**-0.5, shape.window, shape.softcap, self.sinks)
        _native.attend(self.batch, shape.layer, self.queries, out, *form)
        return out

    def stored(self, run: int, side: int) -> npt.NDArray[np.float64]:
        """Return all keys (side 0) or values of a run, as the pool holds them."""
        pages, slots = self._slots(run, 0, sum(self.shape.runs[run]))
        return from_stored(self.pages[pages, self.shape.layer, side, slots], self.shape.dtype)

    def expected(self) -> npt.NDArray[np.float64]:
        results, row = [], 0
        for i, (before, n) in enumerate(self.shape.runs):
            queries = self.queries[row : row + n].astype(np.float64)
            keys, values = self.stored(i, 0), self.stored(i, 1)
            results.append(_attention(queries, keys, values, before, self.shape, self.sinks))
            row += n
        return np.concatenate(results)


def _attention(
    queries: npt.NDArray[np.float64],
    keys: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    before: int,
    shape: Shape,
    sinks: Floats | None,
) -> npt.NDArray[np.float64]:
    """Compute one run's attention, [tokens, heads, head_dim]."""
    out = np.empty_like(queries)
    own = before + np.arange(len(queries))[:, None]
    others = np.arange(len(keys))[None]
    seen = others <= own
    if shape.window:
        seen &= others > own - shape.window
    for head in range(shape.n_heads):
        kv_head = head // shape.n_shared
        scores = queries[:, head] @ keys[:, kv_head].T * shape.head_dim**-0.5
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            most = np.maximum(most, sinks[head])
        weights = np.exp(scores - most)
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[head] - most)
        out[:, head] = weights @ values[:, kv_head] / total
    return out
