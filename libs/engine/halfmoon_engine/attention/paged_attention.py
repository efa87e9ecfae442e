"""Compute causal attention over pages for a ragged batch, under transformers' own models.

A model is configured with the attention `ATTENTION_NAME`. Its modelling code then passes every
layer's queries, keys (after rotary embedding) and values to `paged_attention`, which finds the
batch's plan in a context variable. Per layer, in this order:

    before_layer(l) → pages from others are there → new KV is written to the pool
    → after_layer(l): KV can stream out from here on → each run attends

No mask is built by transformers for an attention of this name: none is registered for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from halfmoon_engine.attention.forward_plan import (
    DecodeGroup,
    ForwardPlan,
    PrefillRun,
    SeenAttention,
)
from halfmoon_engine.attention.kv_pool import KvPool

ATTENTION_NAME = "halfmoon_paged"
#: Queries of a chunk that attend at once: masks and scores stay small.
_QUERY_BLOCK = 512
#: Most queries for which heads that share keys are folded into rows of queries.
_FOLDED_QUERIES = 16
#: Elements of a block's scores where they are computed in full (soft caps, sinks).
_MAX_SCORES = 1 << 23

_plan: ContextVar[ForwardPlan] = ContextVar("halfmoon_plan")


@contextmanager
def use_forward_plan(plan: ForwardPlan) -> Iterator[None]:
    """Let the attention of models follow `plan` while the block runs."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


class _Layer:
    """Parameters of one layer's attention."""

    __slots__ = ("index", "scale", "sinks", "softcap", "window")

    def __init__(
        self,
        index: int,
        scale: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.index = index
        self.scale = scale
        #: Keys that a query sees, its own included; None for all.
        self.window = window
        self.softcap = softcap
        #: [n_heads] logits that take part in the softmax and attend to nothing.
        self.sinks = sinks


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention, with the signature that transformers calls.

    Args:
        module: the layer's attention; ``module.layer_idx`` is the layer among the model's.
        query: [1, n_heads, n_tokens, head_dim].
        key: [1, n_kv_heads, n_tokens, head_dim].
        value: like `key`.
        attention_mask: none; masks follow from the plan.
        scaling: of the scores, 1/√head_dim if none.
        sliding_window: keys that a query sees, its own included; none for all.
        softcap: scores are bounded by ±softcap with tanh (Gemma 2).
        s_aux: [n_heads] attention sinks (gpt-oss).
        others: what the model passes on besides; a probe sees their names, and no forward reads
            them.

    Returns:
        [1, n_tokens, n_heads, head_dim], and no weights.
    """
    plan = _plan.get()
    sliding_window = sliding_window or None  # some configs say 0 for none
    index: Any = module.layer_idx
    layer = _Layer(int(index), scaling, sliding_window, softcap, s_aux)
    plan.n_calls += 1
    if plan.pool is None:
        plan.options.update(name for name, value in others.items() if value is not None)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    plan.seen[layer.index - plan.first_layer] = SeenAttention(
        tuple(key.shape), tuple(value.shape), sliding_window, scale, softcap, s_aux
    )
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    if plan.pool is not None:
        _exchange(plan, plan.pool, layer.index, keys, values)
    if plan.native is not None:
        return plan.native.attend(layer.index, queries, scale, sliding_window, softcap, s_aux)[
            None
        ], None
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for segment in plan.segments:
        rows = slice(segment.row_start, segment.row_start + segment.n_tokens)
        out[rows] = _attend_segment(
            segment, plan.pool, layer, queries[rows], keys[rows], values[rows]
        )
    for group in plan.decodes:
        assert plan.pool is not None
        out[group.query_rows] = _attend_group(
            group, plan.pool, layer, queries[group.query_rows], keys.shape[1]
        )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _exchange(
    plan: ForwardPlan, pool: KvPool, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Fetch old KV, store new KV, and call the hooks around it."""
    own = layer - plan.first_layer
    if plan.before_layer is not None:
        plan.before_layer(own)
    if plan.fetched_pages is not None:
        pool.fetch(layer, plan.fetched_pages)
    if plan.native is not None:
        plan.native.write(layer, keys, values)
    else:
        assert plan.write_rows is not None
        pool.write(layer, plan.write_rows, keys.flatten(1), values.flatten(1))
    if plan.after_layer is not None:
        plan.after_layer(own)


def _attend_group(
    group: DecodeGroup, pool: KvPool, layer: _Layer, queries: torch.Tensor, n_kv_heads: int
) -> torch.Tensor:
    """Attend with one query per run: [n_runs, n_heads, head_dim]."""
    n_runs, n_heads, head_dim = queries.shape
    wanted = group.keys(layer.window)
    keys, values = (
        side.view(n_runs, wanted.n_keys, n_kv_heads, head_dim).transpose(1, 2)
        for side in pool.read(layer.index, wanted.rows)
    )
    # Heads that share keys become rows of queries: keys are read once for all of them.
    folded = queries.reshape(n_runs, n_kv_heads, n_heads // n_kv_heads, head_dim)
    mask = wanted.mask
    if mask is not None:
        mask = mask.expand(-1, -1, folded.shape[2], -1)
    if layer.softcap is None and layer.sinks is None:
        out = scaled_dot_product_attention(folded, keys, values, mask, scale=layer.scale)
    else:
        out = _attend_in_full(folded, keys, values, mask, layer, n_queries=1)
    return out.reshape(n_runs, n_heads, head_dim)


def _attend_segment(
    segment: PrefillRun,
    pool: KvPool | None,
    layer: _Layer,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Several queries of one run: [n_tokens, n_heads, head_dim]."""
    window, n = layer.window, segment.n_tokens
    plain = layer.softcap is None and layer.sinks is None
    first = 0  # position of keys[0]
    if segment.start == 0:
        # The run's own keys are all there is, and they are at hand.
        if plain and (window is None or n <= window):
            q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
            grouped = queries.shape[1] != keys.shape[1]
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=layer.scale, enable_gqa=grouped
            )
            return out[0].transpose(0, 1)
    else:
        assert pool is not None and segment.rows is not None
        first = 0 if window is None else max(0, segment.start - window + 1)
        shape = keys.shape[1:]
        keys, values = (
            side.view(-1, *shape) for side in pool.read(layer.index, segment.rows[first:])
        )
    step = _QUERY_BLOCK
    if not plain:
        step = max(16, min(step, _MAX_SCORES // (queries.shape[1] * keys.shape[0])))
    parts: list[torch.Tensor] = []
    for begin in range(0, n, step):
        block = queries[begin : begin + step]
        position = segment.start + begin
        low = first if window is None else max(first, position - window + 1)
        high = position + block.shape[0]
        near = slice(low - first, high - first)
        parts.append(_attend_block(block, keys[near], values[near], position, low, layer))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_block(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    low: int,
    layer: _Layer,
) -> torch.Tensor:
    """Queries from `position` on over keys from `low` on, each seeing its past and window."""
    n, n_heads, head_dim = queries.shape
    n_kv_heads = keys.shape[1]
    query_at = torch.arange(position, position + n, device=queries.device)[:, None]
    key_at = torch.arange(low, low + keys.shape[0], device=queries.device)
    hidden = key_at > query_at
    if layer.window is not None:
        hidden |= key_at <= query_at - layer.window
    mask = queries.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    plain = layer.softcap is None and layer.sinks is None
    if plain and n > _FOLDED_QUERIES:
        out = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            k,
            v,
            mask,
            scale=layer.scale,
            enable_gqa=n_heads != n_kv_heads,
        )
        return out[0].transpose(0, 1)
    n_shared = n_heads // n_kv_heads
    folded = queries.reshape(n, n_kv_heads, n_shared, head_dim).permute(1, 2, 0, 3)
    folded = folded.reshape(1, n_kv_heads, n_shared * n, head_dim)
    mask = mask.repeat(n_shared, 1)
    if plain:
        out = scaled_dot_product_attention(folded, k, v, mask, scale=layer.scale)
    else:
        out = _attend_in_full(folded, k, v, mask, layer, n_queries=n)
    out = out.view(n_kv_heads, n_shared, n, head_dim).permute(2, 0, 1, 3)
    return out.reshape(n, n_heads, head_dim)


def _attend_in_full(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    layer: _Layer,
    n_queries: int,
) -> torch.Tensor:
    """Attention written out, for what the fused kernel can't: soft caps and sinks.

    Queries are folded: [n_runs, n_kv_heads, n_shared·n_queries, head_dim].
    """
    scale = queries.shape[-1] ** -0.5 if layer.scale is None else layer.scale
    scores = torch.matmul(queries, keys.transpose(-1, -2)).float() * scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if layer.sinks is not None:
        per_row = layer.sinks.float().view(1, keys.shape[1], -1, 1)
        per_row = per_row.repeat_interleave(n_queries, dim=2)
        scores = torch.cat([scores, per_row.expand(scores.shape[0], -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if layer.sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
