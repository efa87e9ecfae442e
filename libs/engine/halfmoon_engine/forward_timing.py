"""Time a forward."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from halfmoon_engine.interface import Engine, EngineStage, Run, StageActivations

#: Of the calling thread, in nanoseconds: on a CPU, waiting for one; and its turns (Linux,
#: Documentation/scheduler/sched-stats.rst).
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def least_forward_s(engine: Engine, runs: Sequence[Run], *, repeats: int, long_s: float) -> float:
    """Return the seconds of the quickest of some forwards, after one more that warms up.

    The quickest, since other processes on the same cores can only add seconds: a whole cluster may
    start on this host at this moment. For the same reason, what the calling thread waits for a CPU
    does not count. A worker that looked slow would get no work, and so nothing to correct it.

    A stage gets activations of zeros, and draws no token before the last stage.

    Args:
        engine: with a pool that holds the pages of `runs`.
        runs: of one forward.
        repeats: timings at the most.
        long_s: a forward that takes longer is the last one.
    """
    if not engine.stage.is_last:
        runs = [msgspec.structs.replace(run, draw=None) for run in runs]
    activations = _scratch_activations(engine.stage, runs)
    engine.forward(runs, activations=activations)
    seconds: list[float] = []
    for _ in range(repeats):
        start, waited = time.perf_counter(), _waited_s()
        engine.forward(runs, activations=activations)
        # Read within the seconds that it is taken from: else they could be below zero.
        waited = _waited_s() - waited
        seconds.append(time.perf_counter() - start - waited)
        if seconds[-1] > long_s:
            break
    return min(seconds)


def _waited_s() -> float:
    """Return for how long the calling thread has waited for a CPU; 0 where no kernel says it."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _scratch_activations(stage: EngineStage, runs: Sequence[Run]) -> StageActivations | None:
    if stage.is_whole:
        return None
    n_bytes = sum(len(run.token_ids) for run in runs) * stage.activation_bytes
    return StageActivations(
        None if stage.is_first else memoryview(bytes(n_bytes)),
        None if stage.is_last else memoryview(bytearray(n_bytes)),
    )
