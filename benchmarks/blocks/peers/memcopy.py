"""One copy of memory in one process, block by block."""

import time

import numpy as np
from clock import ROOM, measure

source, target = np.ones(ROOM, np.uint8), np.ones(ROOM, np.uint8)


def run(op: str, size: int, n_blocks: int) -> float:
    started = time.perf_counter()
    for start in range(0, n_blocks * size, size):
        np.copyto(target[start : start + size], source[start : start + size])
    return time.perf_counter() - started


measure(run, ["put", "get"])
