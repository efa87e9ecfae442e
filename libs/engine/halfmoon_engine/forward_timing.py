"""Time a forward."""

import time
from collections.abc import Sequence

import msgspec

from halfmoon_engine.interface import Engine, EngineStage, Run, StageActivations


def median_forward_s(engine: Engine, runs: Sequence[Run], *, repeats: int, long_s: float) -> float:
    """Return the median seconds of some forwards, after one more that warms up.

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
        start = time.perf_counter()
        engine.forward(runs, activations=activations)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > long_s:
            break
    return sorted(seconds)[len(seconds) // 2]


def _scratch_activations(stage: EngineStage, runs: Sequence[Run]) -> StageActivations | None:
    if stage.is_whole:
        return None
    n_bytes = sum(len(run.token_ids) for run in runs) * stage.activation_bytes
    return StageActivations(
        None if stage.is_first else memoryview(bytes(n_bytes)),
        None if stage.is_last else memoryview(bytearray(n_bytes)),
    )
