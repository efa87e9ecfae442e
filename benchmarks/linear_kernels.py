"""Measure the extension's linears beside torch's: `python -m benchmarks.linear_kernels`.

Shapes are those of a Llama with hidden 512 and of Qwen3-0.6B. Few rows read their weights from
memory: each call takes another copy. torch's packed linears are oneDNN's.
`--clock cpu --threads 1` counts the thread's processor time, for a machine that is busy.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

Call = Callable[[], object]

#: More than the last-level cache of most machines.
_COLD_BYTES = 96 << 20
#: Up to here a call is bound by memory, and GB/s of weights are shown.
_FEW_ROWS = 16


@dataclass(frozen=True)
class Shape:
    n_in: int
    n_out: int
    gated: bool = False
    unpacked: bool = False

    @property
    def name(self) -> str:
        kind = " gated" if self.gated else " head" if self.unpacked else ""
        return f"{self.n_in}→{self.n_out:,}{kind}"


SHAPES = (
    Shape(512, 768),
    Shape(512, 3072, gated=True),
    Shape(1536, 512),
    Shape(1024, 4096),
    Shape(1024, 6144, gated=True),
    Shape(3072, 1024),
    Shape(512, 32_000, unpacked=True),
    Shape(1024, 151_936, unpacked=True),
)


class Clock:
    """Take the least time of each call, with the calls in turn."""

    def __init__(self, kind: str, seconds: float) -> None:
        self._now = time.thread_time if kind == "cpu" else time.perf_counter
        self._seconds = seconds

    def least(self, calls: dict[str, Call]) -> dict[str, float]:
        times = dict.fromkeys(calls, float("inf"))
        end = time.monotonic() + self._seconds
        rounds = 0
        while rounds < 3 or time.monotonic() < end:
            for name, call in calls.items():
                begin = self._now()
                call()
                times[name] = min(times[name], self._now() - begin)
            rounds += 1
        return times


def ceilings(torch: Any, clock: Clock, dtype: str) -> tuple[float, float]:
    """Return GFLOP/s of a large packed product and GB/s of a sum over memory."""
    n_rows, n = 1024, 4096
    x, w = (torch.randn(k, n).to(getattr(torch, dtype)) for k in (n_rows, n))
    memory = torch.ones(256 << 18)
    calls: dict[str, Call] = {"read": memory.sum}
    if dtype == "float16":  # torch has no fast product of these here
        x, w = x.float(), w.float()
    packed = torch.ops.mkldnn._reorder_linear_weight(w, n_rows)
    calls["product"] = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    times = clock.least(calls)
    return 2e-9 * n_rows * n * n / times["product"], 1e-9 * memory.nbytes / times["read"]


def _as_buffer(torch: Any, weights: Any) -> Any:
    return weights.view(torch.uint8).numpy()


def _calls(
    torch: Any, native: Any, shape: Shape, dtype: str, n_rows: int
) -> tuple[dict[str, Call], int]:
    """Return calls that each multiply by all copies of the weights, and how many copies."""
    weights = (torch.randn(shape.n_out, shape.n_in) / shape.n_in**0.5).to(getattr(torch, dtype))
    copies = max(1, _COLD_BYTES // weights.nbytes) if n_rows <= _FEW_ROWS else 1
    all_weights = [weights.clone() for _ in range(copies)]
    x = torch.randn(n_rows, shape.n_in)
    own_x, torch_x = x.numpy(), x.to(weights.dtype)
    y = np.zeros((n_rows, shape.n_out // 2 if shape.gated else shape.n_out), np.float32)
    activation = "silu" if shape.gated else "none"
    n_out, n_in = shape.n_out, shape.n_in

    linears = [
        native.Linear(_as_buffer(torch, w), dtype, n_out, n_in, None, shape.gated)
        for w in (all_weights if not shape.unpacked else ())
    ]

    def ours() -> None:
        if shape.unpacked:
            for w in all_weights:
                native.linear_unpacked(_as_buffer(torch, w), dtype, n_out, n_in, own_x, y, n_rows)
        for linear in linears:
            linear.run(own_x, y, n_rows, activation)

    def by_torch() -> None:
        for w in all_weights:
            torch.nn.functional.linear(torch_x, w)

    calls: dict[str, Call] = {"ours": ours, "torch": by_torch}
    if dtype != "float16":
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, n_rows) for w in all_weights]

        def by_packed() -> None:
            for w in packed:
                torch.ops.mkldnn._linear_pointwise(torch_x, w, None, "none", [], "")

        calls["packed"] = by_packed
    return calls, copies


def _rows(
    torch: Any, native: Any, clock: Clock, dtype: str, counts: list[int]
) -> Iterator[list[str]]:
    product, read = ceilings(torch, clock, dtype)
    yield ["ceiling", "", f"{read:.0f} GB/s", f"{product:.0f} GFLOP/s", "", ""]
    for shape in SHAPES:
        for n_rows in counts:
            if shape.unpacked and n_rows > _FEW_ROWS:
                continue
            calls, copies = _calls(torch, native, shape, dtype, n_rows)
            times = {name: t / copies for name, t in clock.least(calls).items()}
            size = shape.n_in * shape.n_out * (4 if dtype == "float32" else 2)
            few = n_rows <= _FEW_ROWS
            work = size if few else 2 * n_rows * shape.n_in * shape.n_out
            rates = {name: 1e-9 * work / t for name, t in times.items()}
            unit = "GB/s" if few else "GFLOP/s"
            share = max(
                1e-9 * size / times["ours"] / read,
                2e-9 * n_rows * shape.n_in * shape.n_out / times["ours"] / product,
            )
            shown = [
                f"{rates[n]:.1f} {unit}" if n in rates else "" for n in ("ours", "torch", "packed")
            ]
            yield [shape.name, str(n_rows), *shown, f"{share:.2f}"]


def main() -> None:
    """Print one table per dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", default="1,8,16,512,2048")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape and row count")
    parser.add_argument("--isa", help="instruction set; default: the machine's best")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread: give --threads 1")
    import torch

    from halfmoon_engine_native import _native as native

    torch.set_num_threads(options.threads)
    native.set_threads(options.threads)
    if options.isa:
        native.use_instruction_set(options.isa)
    clock = Clock(options.clock, options.seconds)
    counts = [int(count) for count in options.rows.split(",")]
    for dtype in options.dtypes.split(","):
        title = (
            f"{dtype}, {native.instruction_set()}, {options.threads} threads, {options.clock} time"
        )
        table = Table(title=title)
        for name in ("linear", "rows", "ours", "torch", "torch packed", "of the ceiling"):
            table.add_column(name, justify="left" if name == "linear" else "right")
        for row in _rows(torch, native, clock, dtype, counts):
            table.add_row(*row)
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
