"""Time a forward."""

import time
from collections.abc import Sequence

from halfmoon_engine.interface import Engine, Run


def median_forward_s(engine: Engine, runs: Sequence[Run], *, repeats: int, long_s: float) -> float:
    """Return the median seconds of some forwards, after one more that warms up.

    Args:
        engine: with a pool that holds the pages of `runs`.
        runs: of one forward.
        repeats: timings at the most.
        long_s: a forward that takes longer is the last one.
    """
    engine.forward(runs)
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.forward(runs)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > long_s:
            break
    return sorted(seconds)[len(seconds) // 2]
