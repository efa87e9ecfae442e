"""One copy of memory in one process: what no path on one host beats."""

import numpy as np
from measure import ROOM, measure

source, target = np.ones(ROOM, np.uint8), np.ones(ROOM, np.uint8)


def move(op: str, size: int, n_blocks: int) -> None:
    for index in range(n_blocks):
        start, end = index * size, (index + 1) * size
        np.copyto(target[start:end], source[ROOM - end : ROOM - start])


measure(move, [])
