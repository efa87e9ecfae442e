"""Show where a forward's time goes: `python -m benchmarks.engine_profile`.

Runs our engine with the native extension over a pool of its own and times each forward's parts.
A cell has a part's share of the time, and how much of its own limit it reaches. That limit is
max(bytes / speed of reading, operations / speed of the fastest product): "p" where products bound
it, "m" where memory does. Activations belong to the matrix before them. The last column is the
share of all threads' time in which they had nothing to do.
"""

import argparse
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.engine.part_limits import GROUPS, Limit, limits, passes_of
from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.row_options import add_row_options, chosen_rows
from benchmarks.engine.rows import (
    Ceilings,
    DecodeRow,
    MeasuredRow,
    PrefillRow,
    pool_sequences,
)
from benchmarks.engine.shapes import ITEM_BYTES, SHAPES, ModelShape, Precision
from benchmarks.linear_kernels import Clock, ceilings

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Profile:
    """Seconds of one measurement, whole and by part of the native decoder."""

    seconds: float
    by_part: dict[str, float]
    idle_seconds: float

    def of_group(self, group: str) -> float:
        """Return the seconds of a group of parts."""
        return sum(self.by_part[part] for part in GROUPS[group])

    @property
    def other_seconds(self) -> float:
        """Return the seconds outside of the native decoder: Python and sampling."""
        return self.seconds - sum(self.by_part.values())


class ProfiledEngine:
    """Our engine over a pool of its own, with its native decoder timed."""

    def __init__(self, folder: str, precision: Precision, sequences: Sequence[int], threads: int):
        """Load a model, and a pool for sequences of so many tokens."""
        import numpy as np
        import torch

        import halfmoon_engine_native as native
        from halfmoon_engine.load import open_engine

        engine: Any = open_engine(
            folder, block_size=BLOCK_SIZE, dtype=precision, device="cpu", threads=threads
        )
        self._engine = engine
        self._names: tuple[str, ...] = native.FORWARD_PARTS
        self._times = np.zeros((len(self._names), 2))
        n_bytes = sum(map(engine.layout.blocks_for, sequences)) * engine.layout.block_bytes
        self._pool = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE)
        values = torch.frombuffer(self._pool, dtype=getattr(torch, precision))
        values.view(-1, 4096)[:] = torch.randn(4096) / 8
        engine.attach(memoryview(self._pool))
        decoder = engine._runner._decoder
        packed = decoder._decoder

        def forward(*given: Any) -> None:
            packed.forward(*given, self._times)

        decoder._decoder = SimpleNamespace(forward=forward, set_rope=packed.set_rope)

    def measure(self, row: MeasuredRow, chunk: int, seconds: float) -> Profile:
        """Run a row for about so many seconds, and return the fastest run."""
        once = self._once(row, chunk)
        once()
        found: list[Profile] = []
        end = time.monotonic() + seconds
        while len(found) < 3 or time.monotonic() < end:
            self._times[:] = 0
            began = time.perf_counter()
            once()
            took = time.perf_counter() - began
            by_part = dict(zip(self._names, self._times[:, 0].tolist(), strict=True))
            found.append(Profile(took, by_part, float(self._times[:, 1].sum())))
        return min(found, key=lambda each: each.seconds)

    def _once(self, row: MeasuredRow, chunk: int) -> Callable[[], None]:
        from halfmoon_engine.interface import Draw, Run
        from halfmoon_protocol.sampling import Sampling

        greedy = Draw(Sampling(temperature=0.0))
        pages_for = self._engine.layout.blocks_for
        batches: list[list[Run]] = []
        match row:
            case PrefillRow(n):
                tokens = [5 + 7 * i % 300 for i in range(n)]
                for start in range(0, n, chunk):
                    end = min(n, start + chunk)
                    draw = greedy if end == n else None
                    pages = list(range(pages_for(n)))
                    batches.append([Run(tokens[start:end], start, pages, draw, start > 0)])
            case DecodeRow(batch, context):
                each = pages_for(context + 1)
                batches.append(
                    [
                        Run([5 + i], context, list(range(i * each, (i + 1) * each)), greedy, True)
                        for i in range(batch)
                    ]
                )

        def once() -> None:
            for runs in batches:
                self._engine.forward(runs)

        return once


def table(
    title: str,
    found: Sequence[tuple[MeasuredRow, Profile, dict[str, Limit]]],
    threads: int,
) -> str:
    """Return a table in Markdown: a row for each measured one, a column for each group."""
    heads = [title, "ms", "of the limit", *GROUPS, "Python, sampling", "threads idle"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row, profile, least in found:
        whole = sum(limit.seconds for limit in least.values()) / profile.seconds
        cells = [row.label.rpartition(",")[0], f"{profile.seconds * 1e3:,.2f}", f"{whole:.2f}"]
        for group in GROUPS:
            seconds, limit = profile.of_group(group), least[group]
            share = f"{100 * seconds / profile.seconds:.0f} %"
            if seconds > 0:
                share += f", {limit.seconds / seconds:.2f} {limit.bound[0]}"
            cells.append(share)
        cells.append(f"{100 * profile.other_seconds / profile.seconds:.1f} %")
        cells.append(f"{100 * profile.idle_seconds / (threads * profile.seconds):.0f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print one table for each model and precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shapes", default="llama-8x512,qwen3-0.6b", help=f"models, of {', '.join(SHAPES)}")
    add("--dtypes", default=",".join(ITEM_BYTES), help="precisions of weights and KV")
    add_row_options(parser)
    add("--threads", type=int, default=2)
    add("--chunk", type=int, default=2048, help="tokens of one forward pass at the most")
    add("--seconds", type=float, default=1.0, help="for each row")
    options = parser.parse_args()
    os.environ["HALFMOON_ENGINE_NATIVE"] = "1"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    rows = chosen_rows(options)
    for name in options.shapes.split(","):
        for precision in options.dtypes.split(","):
            print(f"\n{_profile(SHAPES[name], precision, rows, options)}", flush=True)


def _profile(
    shape: ModelShape, precision: Precision, rows: Sequence[MeasuredRow], options: Any
) -> str:
    import torch

    sequences = pool_sequences(rows)
    engine = ProfiledEngine(str(model_folder(shape)), precision, sequences, options.threads)
    torch.set_num_threads(options.threads)
    product, read = ceilings(torch, Clock("wall", 2.0), precision)
    most = Ceilings(product * 1e9, read * 1e9)
    found = [
        (
            row,
            engine.measure(row, options.chunk, options.seconds),
            limits(shape, precision, passes_of(row, options.chunk), most),
        )
        for row in rows
    ]
    title = f"{shape.name}, {precision}"
    said = f"ceilings: {product:,.0f} GFLOP/s, {read:.1f} GB/s read; {options.threads} threads"
    return f"{table(title, found, options.threads)}\n\n{said}"


if __name__ == "__main__":
    main()
