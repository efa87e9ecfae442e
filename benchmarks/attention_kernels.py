"""Measure paged attention in C++ beside ceilings: `python -m benchmarks.attention_kernels`.

Decode reads memory: its ceiling is a sum over as many bytes. Prefill multiplies: its ceiling is
torch's product of large matrices in the pool's dtype. torch's own attention computes on contiguous
copies, for scale. The best of several rounds counts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from halfmoon_engine_native import _native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Case:
    """Runs of equal length, and the model's sizes."""

    before: int
    n_tokens: int
    batch: int
    head_dim: int
    n_kv_heads: int
    n_shared: int

    @property
    def name(self) -> str:
        runs = f"{self.batch} x " if self.batch > 1 else ""
        heads = f"{self.n_kv_heads}x{self.n_shared} heads of {self.head_dim}"
        return f"{runs}{self.before}+{self.n_tokens}, {heads}"

    @property
    def end(self) -> int:
        return self.before + self.n_tokens

    def n_bytes(self, number: int) -> int:
        """Bytes of the keys and values that are read."""
        return self.batch * self.end * 2 * self.n_kv_heads * self.head_dim * number

    @property
    def n_operations(self) -> int:
        """Multiplications and additions of both products, without what the mask hides."""
        pairs = self.n_tokens * self.before + self.n_tokens * (self.n_tokens + 1) // 2
        return 4 * self.batch * pairs * self.n_kv_heads * self.n_shared * self.head_dim


DECODE = [
    Case(before - 1, 1, batch, head_dim, 8, n_shared)
    for head_dim, n_shared in ((64, 4), (128, 2))
    for before, batch in ((512, 1), (512, 16), (4096, 1), (4096, 8), (32_768, 1))
] + [
    Case(2047, 1, batch, head_dim, n_kv_heads, 2)
    for head_dim, n_kv_heads in ((64, 4), (128, 8))
    for batch in (8, 16)
]
PREFILL = [
    Case(before, n_tokens, 1, head_dim, 8, n_shared)
    for head_dim, n_shared in ((64, 4), (128, 2))
    for before, n_tokens in ((0, 512), (0, 2048), (0, 8192), (4096, 512), (4096, 8))
]


def main() -> None:
    """Measure, and print one table a dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--instructions", default=_native.instruction_set())
    given = parser.parse_args()
    _native.set_threads(given.threads)
    _native.use_instruction_set(given.instructions)
    torch.set_num_threads(given.threads)
    console = Console()
    read = read_rate(given.seconds)
    console.print(f"{given.instructions}, {given.threads} threads; memory read {read:.1f} GB/s")
    for dtype in DTYPES:
        table = Table("case", "ours", "rate", "of ceiling", "torch", title=dtype)
        product = product_rate(dtype, given.seconds)
        for case in DECODE:
            ours, theirs = measure(case, dtype, given.seconds)
            rate = case.n_bytes(DTYPES[dtype].itemsize) / ours / 1e9
            add_row(table, case, ours, f"{rate:.1f} GB/s", rate / read, theirs)
        for case in PREFILL:
            ours, theirs = measure(case, dtype, given.seconds)
            rate = case.n_operations / ours / 1e9
            add_row(table, case, ours, f"{rate:.0f} GFLOP/s", rate / product, theirs)
        console.print(table, f"{dtype} product: {product:.0f} GFLOP/s")


def add_row(table: Table, case: Case, ours: float, rate: str, share: float, theirs: float) -> None:
    table.add_row(case.name, f"{ours * 1e3:.3f} ms", rate, f"{share:.2f}", f"{theirs * 1e3:.3f} ms")


def best_time(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest of many rounds, in seconds; at least three."""
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return min(times)


def read_rate(seconds: float) -> float:
    """Return GB/s of a sum over memory that no cache holds."""
    numbers = torch.ones(64 * 1024 * 1024)
    return numbers.nbytes / best_time(numbers.sum, seconds) / 1e9


def product_rate(dtype: str, seconds: float) -> float:
    """Return GFLOP/s of a matrix product; float16 is computed in float32."""
    n, kind = 2048, torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = torch.randn(n, n).to(kind), torch.randn(n, n).to(kind)
    return 2 * n**3 / best_time(lambda: a @ b, seconds) / 1e9


def measure(case: Case, dtype: str, seconds: float) -> tuple[float, float]:
    """Return the seconds of our attention over shuffled pages, and of torch's."""
    kind, n_heads = DTYPES[dtype], case.n_kv_heads * case.n_shared
    n_pages = -(-case.end // BLOCK_SIZE)
    sizes = (case.batch * n_pages, 2, BLOCK_SIZE, case.n_kv_heads, case.head_dim)
    pool = torch.randn(sizes).to(kind)
    memory = pool.view(torch.uint8).numpy()
    native = _native.Pool(memory, dtype, 1, BLOCK_SIZE, case.n_kv_heads, case.head_dim)
    order = np.random.default_rng(0).permutation(case.batch * n_pages).astype(np.int32)
    batch = _native.Batch(
        native,
        np.full(case.batch, case.n_tokens, np.int64),
        np.full(case.batch, case.before, np.int64),
        np.full(case.batch, n_pages, np.int64),
        order,
    )
    scale = case.head_dim**-0.5
    queries = torch.randn(case.batch * case.n_tokens, n_heads, case.head_dim)
    out = torch.empty_like(queries)
    ours = best_time(
        lambda: _native.attend(batch, 0, queries.numpy(), out.numpy(), n_heads, scale), seconds
    )

    keys, values = (
        pool[torch.from_numpy(order).long(), side]
        .reshape(case.batch, -1, case.n_kv_heads, case.head_dim)[:, : case.end]
        .transpose(1, 2)
        .contiguous()
        for side in range(2)
    )
    asked = queries.to(kind).view(case.batch, case.n_tokens, n_heads, -1).transpose(1, 2)
    # torch's fast path is causal from the first key on; a chunk after others needs a mask.
    mask = None
    if case.before and case.n_tokens > 1:
        mask = torch.ones(case.n_tokens, case.end, dtype=torch.bool).tril(case.before)

    def attend_in_torch() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            asked, keys, values, mask, is_causal=case.before == 0, enable_gqa=True
        )

    return ours, best_time(attend_in_torch, seconds)


if __name__ == "__main__":
    main()
