"""Plan the attention of a ragged batch as tensors, once per forward.

The batch's tokens lie one run after the other in a single row: run i has rows
``row_start … row_start + n - 1`` of queries. Runs of one token (decode steps) are grouped by
length and attend together, padded; longer runs (prefill chunks) attend one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.attention.kv_pool import KvPool, base_rows
from halfmoon_engine.interface import LayerHook, Run
from halfmoon_protocol.kv_layout import KvLayout

#: A decode step joins a group while its context is at most so many times the shortest one's, plus
_LENGTH_RATIO = 1.25
#: so many tokens: for short contexts, padding is cheaper than another call.
_LENGTH_SLACK = 128
#: Most bytes of one layer's keys and values of a group: they are gathered before attention reads
#: them, and should still be in the processor's cache.
_GATHERED_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class PrefillRun:
    """A run of several tokens: a prompt or a chunk of one."""

    row_start: int
    n_tokens: int
    #: Position of the run's first token.
    start: int
    #: Base rows of positions 0 … start+n_tokens-1; None when no earlier position is read.
    rows: torch.Tensor | None


@dataclass(frozen=True)
class GroupKeys:
    """Keys that a decode group reads in a layer: [n_runs, n_keys], flattened."""

    rows: torch.Tensor
    n_keys: int
    #: [n_runs, 1, 1, n_keys], 0 or -inf where a shorter run is padded; None without padding.
    mask: torch.Tensor | None


@dataclass
class DecodeGroup:
    """Runs of one token whose contexts are about equally long."""

    #: Rows of the queries: a slice when they follow each other.
    query_rows: torch.Tensor | slice
    #: Tokens of each run's context, the new one included.
    ends: NDArray[np.int64]
    #: [n_runs, longest] base rows, padded with the run's last one: attention never reads another
    #: run's bytes, not even masked ones.
    table: NDArray[np.int64]
    device: torch.device
    dtype: torch.dtype
    _by_window: dict[int, GroupKeys] = field(default_factory=dict)

    def keys(self, window: int | None) -> GroupKeys:
        """Return the keys within `window` tokens; layers with equal windows share them."""
        longest = self.table.shape[1]
        n_keys = longest if window is None else min(window, longest)
        if n_keys not in self._by_window:
            self._by_window[n_keys] = self._make_keys(n_keys)
        return self._by_window[n_keys]

    def _make_keys(self, n_keys: int) -> GroupKeys:
        table, counts = self.table, np.minimum(self.ends, n_keys)
        if n_keys < table.shape[1]:
            columns = (self.ends - counts)[:, None] + np.arange(n_keys)
            table = np.take_along_axis(table, np.minimum(columns, self.ends[:, None] - 1), axis=1)
        mask: torch.Tensor | None = None
        if counts.min() < n_keys:
            hidden = torch.from_numpy(np.arange(n_keys) >= counts[:, None])
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None, None, :].to(self.device)
        rows = torch.from_numpy(np.ascontiguousarray(table).reshape(-1)).to(self.device)
        return GroupKeys(rows, n_keys, mask)


class NativeAttention(Protocol):
    """Attention of one batch over the pool, by the native extension."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each [n_tokens, n_kv_heads, head_dim]."""
        ...

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with queries of shape [n_tokens, n_heads, head_dim]; the result is like them."""
        ...


@dataclass(frozen=True)
class SeenAttention:
    """Shapes and options of one layer's call of attention."""

    #: [1, n_kv_heads, n_tokens, head_dim]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    window: int | None
    scale: float
    softcap: float | None
    #: [n_heads]
    sinks: torch.Tensor | None

    @property
    def n_kv_heads(self) -> int:
        """Heads of keys."""
        return self.key_shape[1]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.key_shape[3]


@dataclass
class ForwardPlan:
    """Plan of one forward: the rows to read and write, and the hooks to call."""

    #: None while a model is probed: then keys and values are used and not kept.
    pool: KvPool | None
    segments: list[PrefillRun]
    decodes: list[DecodeGroup]
    #: [n_tokens] base rows of all tokens of the batch, in order.
    write_rows: torch.Tensor | None
    #: Pages that other processes may have written since the engine last read them.
    fetched_pages: torch.Tensor | None
    #: Number of the first layer that is computed, among those of the model and of the pool.
    first_layer: int = 0
    before_layer: LayerHook | None = None
    after_layer: LayerHook | None = None
    #: Attends and stores KV in place of torch; None: torch does.
    native: NativeAttention | None = None
    #: How each layer called attention; layers count from `first_layer`.
    seen: dict[int, SeenAttention] = field(default_factory=dict)
    #: Calls of attention over all layers.
    n_calls: int = 0
    #: While a model is probed: names of options that attention was given and does not read.
    options: set[str] = field(default_factory=set)


def plan_probe(lengths: Sequence[int], first_layer: int = 0) -> ForwardPlan:
    """Plan whole sequences of these lengths side by side, without a pool."""
    starts = np.cumsum([0, *lengths])
    segments = [PrefillRun(int(a), n, 0, None) for a, n in zip(starts, lengths, strict=False)]
    return ForwardPlan(None, segments, [], None, None, first_layer)


def plan_native(pool: KvPool, attention: NativeAttention, first_layer: int = 0) -> ForwardPlan:
    """Plan a forward whose attention is native: the extension holds the batch."""
    return ForwardPlan(pool, [], [], None, None, first_layer, native=attention)


def plan_forward(
    runs: Sequence[Run],
    layout: KvLayout,
    pool: KvPool,
    device: torch.device,
    dtype: torch.dtype,
    first_layer: int = 0,
) -> ForwardPlan:
    """Lay out a checked batch over the pool, for the layers from `first_layer` on."""
    segments: list[PrefillRun] = []
    written: list[NDArray[np.int64]] = []
    steps: list[tuple[int, NDArray[np.int64], int]] = []
    fetched: list[NDArray[np.int64]] = []
    row = 0
    for run in runs:
        n, pages = len(run.token_ids), np.asarray(run.pages, dtype=np.int64)
        end = run.start + n
        rows = base_rows(layout, pages, end)
        written.append(rows[run.start :])
        if run.start > 0 and not run.continues:
            fetched.append(pages[: layout.blocks_for(run.start)])
        if n == 1:
            steps.append((row, rows, end))
        else:
            kept = torch.from_numpy(rows).to(device) if run.start else None
            segments.append(PrefillRun(row, n, run.start, kept))
        row += n
    return ForwardPlan(
        pool=pool,
        segments=segments,
        decodes=_group(steps, layout, device, dtype),
        write_rows=torch.from_numpy(np.concatenate(written)).to(device),
        fetched_pages=torch.from_numpy(np.concatenate(fetched)) if fetched else None,
        first_layer=first_layer,
    )


def _group(
    steps: list[tuple[int, NDArray[np.int64], int]],
    layout: KvLayout,
    device: torch.device,
    dtype: torch.dtype,
) -> list[DecodeGroup]:
    groups: list[list[tuple[int, NDArray[np.int64], int]]] = []
    most_keys = _GATHERED_BYTES // (layout.layer_bytes // layout.block_size)
    for step in sorted(steps, key=lambda step: step[2]):
        if (
            groups
            and step[2] <= groups[-1][0][2] * _LENGTH_RATIO + _LENGTH_SLACK
            and step[2] * (len(groups[-1]) + 1) <= most_keys
        ):
            groups[-1].append(step)
        else:
            groups.append([step])
    return [_decode_group(sorted(group, key=lambda s: s[0]), device, dtype) for group in groups]


def _decode_group(
    steps: list[tuple[int, NDArray[np.int64], int]], device: torch.device, dtype: torch.dtype
) -> DecodeGroup:
    longest = max(end for _, _, end in steps)
    table = np.empty((len(steps), longest), dtype=np.int64)
    for i, (_, rows, end) in enumerate(steps):
        table[i, :end] = rows
        table[i, end:] = rows[-1]
    first, last = steps[0][0], steps[-1][0]
    query_rows: torch.Tensor | slice = slice(first, last + 1)
    if last - first + 1 != len(steps):
        query_rows = torch.tensor([row for row, _, _ in steps], device=device)
    ends = np.asarray([end for _, _, end in steps], dtype=np.int64)
    return DecodeGroup(query_rows, ends, table, device, dtype)
