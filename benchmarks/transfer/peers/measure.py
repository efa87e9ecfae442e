"""What all peers' programs share: the load and the clock. Only the standard library."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

KIB, MIB = 1024, 1024 * 1024
#: Bytes of memory at either side.
ROOM = 256 * MIB
_ROUNDS = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def batch_of(size: int) -> int:
    """Blocks in one request: at most 128 (the reference's queues take no more), and 64 MiB."""
    return max(1, min(128, 64 * MIB // size))


def arguments() -> tuple[list[str], list[int], float]:
    """Ops, sizes in bytes, and seconds per measurement."""
    ops, sizes, seconds = sys.argv[1:4]
    return ops.split(","), [int(size) for size in sizes.split(",")], float(seconds)


def cpu_s(pids: list[int]) -> float:
    """Processor seconds of this process and these."""
    total = time.process_time()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return total


def measure(move: Callable[[str, int, int], None], pids: list[int]) -> None:
    """Time `move(op, size, n_blocks)`, which returns when all is there; prints the results."""
    ops, sizes, seconds = arguments()
    for op in ops:
        for size in sizes:
            try:
                result = _one(move, op, size, seconds, pids)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"op": op, "size": size} | result), flush=True)


def _one(
    move: Callable[[str, int, int], None], op: str, size: int, seconds: float, pids: list[int]
) -> dict[str, float]:
    n_blocks = batch_of(size)
    move(op, size, n_blocks)
    move(op, size, 1)
    rates = []
    n_bytes, cpu = 0, cpu_s(pids)
    for _ in range(_ROUNDS):
        started = now = time.perf_counter()
        n_moved = 0
        while now - started < seconds / _ROUNDS:
            move(op, size, n_blocks)
            n_moved += size * n_blocks
            now = time.perf_counter()
        rates.append(n_moved / (now - started) / 1e9)
        n_bytes += n_moved
    cost = (cpu_s(pids) - cpu) / (n_bytes / 1e9)
    times = []
    until = time.perf_counter() + seconds / 3
    while not times or time.perf_counter() < until:
        started = time.perf_counter()
        move(op, size, 1)
        times.append(time.perf_counter() - started)
    times.sort()
    return {
        "gb_per_s": statistics.median(rates),
        "cpu_s_per_gb": cost,
        "p50_us": statistics.median(times) * 1e6,
        "p99_us": times[int(len(times) * 0.99)] * 1e6,
    }
