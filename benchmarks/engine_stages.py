"""Time a prompt on an engine of all layers and on engines of its stages, one process after another.

`python -m benchmarks.engine_stages` prints, for each engine, the memory that loading it took and
the seconds of the prompt's chunks. The last line is what a group would take if activations
travelled in no time: chunk i runs at a stage once chunk i-1 has left it and chunk i has come.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import ITEM_BYTES, SHAPES

BLOCK_SIZE = 64


class StageTimes(msgspec.Struct, frozen=True):
    """Measurements of one engine."""

    description: str
    n_layers: int
    #: Bytes that the process grew by while it loaded.
    loaded_bytes: int
    #: Seconds of each chunk, the least of all rounds.
    chunk_s: list[float]


def measure(folder: str, index: int, n_stages: int, options: Any) -> StageTimes:
    """Load an engine in this process and time the chunks of a prompt."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    import halfmoon_engine.checkpoints.torch_loader  # noqa: F401 - not counted as the model's memory
    from halfmoon_engine.interface import Draw, Run, StageActivations
    from halfmoon_engine.load import open_engine
    from halfmoon_protocol.sampling import Sampling

    before = _resident_bytes()
    engine = open_engine(
        folder,
        block_size=BLOCK_SIZE,
        dtype=options.dtype,
        device="cpu",
        threads=1,
        stage_index=index,
        n_stages=n_stages,
    )
    loaded = _resident_bytes() - before
    stage, pages = engine.stage, range(engine.layout.blocks_for(options.tokens))
    engine.attach(memoryview(bytearray(len(pages) * engine.layout.block_bytes)))
    edges = list(range(0, options.tokens, options.chunk))
    found = [float("inf")] * len(edges)
    for _ in range(options.rounds):
        for i, start in enumerate(edges):
            n = min(options.chunk, options.tokens - start)
            ends = start + n == options.tokens
            draw = Draw(Sampling(temperature=0.0)) if ends and stage.is_last else None
            n_bytes = n * stage.activation_bytes
            activations = StageActivations(
                None if stage.is_first else memoryview(bytearray(n_bytes)),
                None if stage.is_last else memoryview(bytearray(n_bytes)),
            )
            run = Run([5 + 7 * j % 300 for j in range(n)], start, pages, draw)
            began = time.perf_counter()
            engine.forward([run], activations=activations)
            found[i] = min(found[i], time.perf_counter() - began)
    return StageTimes(engine.description, stage.n_layers, loaded, found)


def pipeline_s(stages: Sequence[StageTimes]) -> float:
    """Return the seconds until the last chunk has left the last stage."""
    free = [0.0] * len(stages)
    for chunk in range(len(stages[0].chunk_s)):
        came = 0.0
        for number, stage in enumerate(stages):
            came = free[number] = max(came, free[number]) + stage.chunk_s[chunk]
    return free[-1]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shape", default="llama-8x512", choices=sorted(SHAPES))
    add("--dtype", default="float32", choices=sorted(ITEM_BYTES))
    add("--stages", default="1,2", help="numbers of stages; 1 is the engine of all layers")
    add("--tokens", type=int, default=8192)
    add("--chunk", type=int, default=1024)
    add("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = str(model_folder(SHAPES[options.shape]))
    print(
        f"{options.shape}, {options.dtype}, {options.tokens} tokens by {options.chunk}, 1 thread\n"
    )
    print("| stage | layers | MiB to load | s of all chunks | computed by |\n|---|---|---|---|---|")
    totals: list[tuple[int, float]] = []
    spawn = multiprocessing.get_context("spawn")
    for n_stages in map(int, options.stages.split(",")):
        stages: list[StageTimes] = []
        for index in range(n_stages):
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                stages.append(process.submit(measure, folder, index, n_stages, options).result())
            one = stages[-1]
            print(
                f"| {index} of {n_stages} | {one.n_layers} | {one.loaded_bytes / 2**20:,.0f} "
                f"| {sum(one.chunk_s):.2f} | {one.description} |",
                flush=True,
            )
        totals.append((n_stages, pipeline_s(stages)))
    least = totals[0][1]
    print("\nwithout the way of activations: ", end="")
    print(", ".join(f"{n} in a row {s:.2f} s ({s / least:.2f})" for n, s in totals))


if __name__ == "__main__":
    main()
