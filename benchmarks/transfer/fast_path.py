"""Measure what the fast path buys small transfers: `python -m benchmarks.transfer.fast_path`.

One engine writes to a process on the same host, with its fast path and without, in turns. Printed
are medians over the rounds and their ratios (without : with). Processor time is that of the
initiating process, so that other load on the machine matters little.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfmoon_metadata.stores.memory_store import MemoryStore
from halfmoon_testing.processes.segment_process import SegmentProcess
from halfmoon_transfer import Piece, TransferEngine, TransferSettings
from halfmoon_transfer.transfers.fast_path import FastPath

#: Label: backend, and whether the native extension is used.
PATHS = {"shm": ("shm", False), "tcp, pure": ("tcp", False), "tcp, native": ("tcp", True)}


def main() -> None:
    """Print a line per path, call and size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer.fast_path")
    parser.add_argument("--sizes", default="4096,65536", help="bytes per transfer")
    parser.add_argument("--transfers", type=int, default=1000, help="per round")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    for label, (backend, native) in PATHS.items():
        for size in map(int, chosen.sizes.split(",")):
            measure(label, backend, native, size, chosen.transfers, chosen.rounds)


def measure(label: str, backend: str, native: bool, size: int, count: int, rounds: int) -> None:
    """Measure both ways in turns over one path and one size."""
    metadata = MemoryStore()
    settings = TransferSettings(native=native)
    with (
        SegmentProcess("there", 1, backend, size, metadata, settings) as there,
        TransferEngine.open(
            "here", metadata=metadata, backends=(backend,), settings=settings
        ) as here,
    ):
        local = here.allocate(size)
        piece = Piece(local.region, 0, there.region, 0, size)
        calls: dict[str, Callable[[], object]] = {
            "transfer": lambda: here.transfer("write", [piece]),
            "submit": lambda: here.submit("write", [piece]).result(),
        }
        for name, call in calls.items():
            with_it, without = [], []
            for _ in range(rounds):
                with_it.append(_seconds(call, count))
                with _no_fast_path():
                    without.append(_seconds(call, count))
            wall, cpu = (
                (
                    statistics.median(each[i] for each in with_it) / count * 1e6,
                    statistics.median(each[i] for each in without) / count * 1e6,
                )
                for i in (0, 1)
            )
            print(
                f"{label:12} {name:8} {size:7} bytes: "
                f"wall {wall[0]:6.1f} / {wall[1]:6.1f} µs, {wall[1] / wall[0]:.2f} : 1; "
                f"CPU {cpu[0]:6.1f} / {cpu[1]:6.1f} µs, {cpu[1] / cpu[0]:.2f} : 1",
                flush=True,
            )


def _seconds(call: Callable[[], object], count: int) -> tuple[float, float]:
    """Return wall and processor seconds of so many calls."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    return time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def _no_fast_path() -> Iterator[None]:
    copy, move = FastPath.copy, FastPath.move
    FastPath.copy = FastPath.move = lambda *_: None  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FastPath.copy, FastPath.move = copy, move  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
