"""What all peers' programs share: the load and the clock. Only the standard library."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

MIB = 1024 * 1024
#: Bytes of a client's memory, and at the most of one batch.
ROOM = 256 * MIB
#: Bytes that a store holds.
CAPACITY = 1024 * MIB


def batch_of(size: int) -> int:
    """Blocks in one request."""
    return min(64, ROOM // size)


def measure(
    run: Callable[[str, int, int], float], ops: Sequence[str] = ("put", "get", "exists")
) -> None:
    """Time `run(op, size, n_blocks)`, which returns the seconds that count; prints the results."""
    sizes, seconds = [int(size) for size in sys.argv[-2].split(",")], float(sys.argv[-1])
    for size in sizes:
        for op in ops:
            try:
                result = _one(run, op, size, seconds)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"op": op, "size": size} | result), flush=True)


def _one(
    run: Callable[[str, int, int], float], op: str, size: int, seconds: float
) -> dict[str, float]:
    n_blocks = batch_of(size)
    many, one = _times(run, op, size, n_blocks, seconds), _times(run, op, size, 1, seconds / 2)
    return {
        "gb_per_s": n_blocks * size / many / 1e9,
        "batch_us": many * 1e6,
        "p50_us": one * 1e6,
    }


def _times(
    run: Callable[[str, int, int], float], op: str, size: int, n_blocks: int, seconds: float
) -> float:
    """The median, after one that does not count."""
    run(op, size, n_blocks)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        times.append(run(op, size, n_blocks))
    return statistics.median(times)
