"""A file past the page cache (O_DIRECT): blocks written and read at random places, 8 at a time."""

import mmap
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from clock import ROOM, batch_of, measure

pool = ThreadPoolExecutor(8)
memory = memoryview(mmap.mmap(-1, ROOM))
memory[:] = os.urandom(1 << 20) * (ROOM >> 20)
with tempfile.NamedTemporaryFile(dir=".", prefix="raw-disk-") as file:
    os.posix_fallocate(file.fileno(), 0, 2 * ROOM)
    fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
    for start in (0, ROOM):
        os.pwritev(fd, [memory], start)

    def run(op: str, size: int, n_blocks: int) -> float:
        move = os.pwritev if op == "put" else os.preadv
        places = random.sample(range(2 * ROOM // size), max(n_blocks, batch_of(size)))[:n_blocks]

        def one(index: int) -> None:
            view = memory[index * size : (index + 1) * size]
            assert move(fd, [view], places[index] * size) == size

        started = time.perf_counter()
        if n_blocks == 1:
            one(0)
        else:
            list(pool.map(one, range(n_blocks)))
        return time.perf_counter() - started

    measure(run, ["put", "get"])
