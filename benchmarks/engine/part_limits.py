"""Compute the least time of each part of a forward on a machine with given ceilings. No I/O.

A matrix is bound by products or by reading its weights, attention by products or by reading KV, and
what is done to each row alone by reading and writing rows. Each call counts for itself.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from benchmarks.engine.rows import Ceilings, DecodeRow, MeasuredRow, PrefillRow
from benchmarks.engine.shapes import ITEM_BYTES, ModelShape, Precision

Bound = Literal["products", "memory"]

#: Parts of the native decoder's `FORWARD_PARTS` that a table shows as one.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "QKV": ("qkv",),
        "out": ("out",),
        "up": ("up",),
        "down": ("down",),
        "head": ("head",),
        "attention": ("attention",),
        "norms, rotary, KV write": ("embedding", "norms", "rotary", "kv_write"),
    }
)


@dataclass(frozen=True)
class Work:
    """What one call of a part takes at least."""

    n_bytes: float
    flops: float = 0.0

    def seconds(self, most: Ceilings) -> tuple[float, Bound]:
        """Return its least time, and which ceiling gives it."""
        by_memory, by_products = self.n_bytes / most.bytes_per_s, self.flops / most.flops_per_s
        return (by_products, "products") if by_products > by_memory else (by_memory, "memory")


@dataclass(frozen=True)
class Pass:
    """One forward: so many requests, each with new tokens behind others."""

    n_requests: int
    n_new: int
    n_before: int
    draws: bool

    @property
    def n_rows(self) -> int:
        """Tokens of all requests."""
        return self.n_requests * self.n_new

    @property
    def n_drawn(self) -> int:
        """Rows that go through the head."""
        return self.n_requests if self.draws else 0


def passes_of(row: MeasuredRow, chunk: int) -> Sequence[Pass]:
    """Return the forwards of a measured row: a prompt's chunks, or one step."""
    match row:
        case PrefillRow(n):
            return [
                Pass(1, min(chunk, n - start), start, start + chunk >= n)
                for start in range(0, n, chunk)
            ]
        case DecodeRow(batch, context):
            return [Pass(batch, 1, context, True)]


@dataclass(frozen=True)
class Limit:
    """The least time of a group of parts in some forwards, and what bounds most of it."""

    seconds: float
    bound: Bound


def limits(
    shape: ModelShape, precision: Precision, passes: Sequence[Pass], most: Ceilings
) -> dict[str, Limit]:
    """Return the limit of each of `GROUPS`."""
    sums: dict[str, dict[Bound, float]] = defaultdict(lambda: {"products": 0.0, "memory": 0.0})
    for each in passes:
        for group, work in _calls(shape, ITEM_BYTES[precision], each):
            seconds, bound = work.seconds(most)
            sums[group][bound] += seconds
    found: dict[str, Limit] = {}
    for group, by_bound in sums.items():
        bound = max(by_bound, key=lambda name: by_bound[name])
        found[group] = Limit(sum(by_bound.values()), bound)
    return found


def _calls(shape: ModelShape, item: int, each: Pass) -> Iterator[tuple[str, Work]]:
    queries, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    n, hidden = each.n_rows, shape.hidden
    yield "norms, rotary, KV write", Work(n * hidden * (item + 4))
    for layer in range(shape.n_layers):
        # In the last layer only drawn rows go on behind their keys and values.
        n_on = n if layer + 1 < shape.n_layers else each.n_drawn
        yield "QKV", _matrix(hidden, queries + 2 * kv, n, item)
        yield (
            "norms, rotary, KV write",
            Work(n * (8 * (hidden + queries + kv) + 2 * kv * (4 + item))),
        )
        if not n_on:
            continue
        yield "attention", _attention(shape, item, each, n_on)
        yield "out", _matrix(queries, hidden, n_on, item)
        yield "norms, rotary, KV write", Work(n_on * 8 * hidden)
        yield "up", _matrix(hidden, 2 * shape.intermediate, n_on, item)
        yield "down", _matrix(shape.intermediate, hidden, n_on, item)
    if each.n_drawn:
        yield "head", _matrix(hidden, shape.n_vocab, each.n_drawn, item)


def _matrix(n_in: int, n_out: int, n_rows: int, item: int) -> Work:
    return Work(n_in * n_out * item, 2 * n_in * n_out * n_rows)


def _attention(shape: ModelShape, item: int, each: Pass, n_on: int) -> Work:
    end = each.n_before + each.n_new
    n_bytes = each.n_requests * end * 2 * shape.n_kv_heads * shape.head_dim * item
    n_queries = n_on // each.n_requests  # of each request, the last ones
    pairs = n_queries * (2 * end - n_queries + 1) // 2
    return Work(n_bytes, 4 * shape.n_heads * shape.head_dim * each.n_requests * pairs)
