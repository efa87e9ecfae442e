"""Fit the scheduler's cost models to timed forwards.

    prefill(n, p) = c0 + c1·(n-p) + c2·(n²-p²)        decode(b, c) = d0 + d1·b + d2·c

with n tokens of which p are cached, b requests in a step and c context tokens in it.
Coefficients are kept at zero or above: a prediction must never shrink as work grows.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.forward_timing import least_forward_s
from halfmoon_engine.interface import Draw, Engine, Run
from halfmoon_protocol.messages import DecodeCost, PrefillCost
from halfmoon_protocol.sampling import Sampling
from halfmoon_protocol.stage_layers import layer_counts, stage_weights

#: Seconds after which no further shape is timed.
BUDGET_S = 3.0
#: (tokens to compute, cached tokens before them). Those behind a long prefix show what attention
#: costs there, in a short forward: from short prompts alone, c2 would be guessed.
_PREFILL_SHAPES = ((32, 0), (128, 0), (32, 8160), (512, 0), (128, 3968), (1024, 0), (2048, 0))
#: (requests, context tokens of each)
_DECODE_SHAPES = ((1, 64), (8, 64), (1, 512), (8, 512), (4, 1024), (1, 2048))
_REPEATS = 3
_GREEDY = Draw(Sampling(temperature=0.0))


def measure_costs(engine: Engine, n_pages: int) -> tuple[PrefillCost, DecodeCost]:
    """Time forwards of growing size on the first pages of the pool and fit both models.

    Costs are those of all layers: a stage's seconds are divided by its weight among all stages.

    Decode steps and cached prefixes read any content of the pages. Shapes that exceed the context
    or the pool are left out; so are the largest ones on a slow machine.

    Args:
        engine: with a pool attached that nobody uses.
        n_pages: pages in that pool.
    """
    block_size = engine.layout.block_size
    most = min(engine.max_context, n_pages * block_size)
    deadline = time.perf_counter() + BUDGET_S
    prefills: list[tuple[list[float], float]] = []
    for new, cached in _prefill_shapes(most):
        n = cached + new
        run = Run([1] * new, cached, range(engine.layout.blocks_for(n)), _GREEDY)
        prefills.append(([1.0, new, n * n - cached * cached], _timed(engine, [run])))
        if time.perf_counter() > deadline:
            break
    decodes: list[tuple[list[float], float]] = []
    deadline = time.perf_counter() + BUDGET_S
    for batch, context in _DECODE_SHAPES:
        length = min(context, most)
        pages = engine.layout.blocks_for(length)
        if batch * pages > n_pages:
            continue
        runs = [
            Run([1], length - 1, range(i * pages, (i + 1) * pages), _GREEDY) for i in range(batch)
        ]
        decodes.append(([1.0, batch, batch * length], _timed(engine, runs)))
        if time.perf_counter() > deadline:
            break
    c0, c1, c2 = _fit(prefills)
    d0, d1, d2 = _fit(decodes)
    return PrefillCost(c0_s=c0, c1_s=c1, c2_s=c2), DecodeCost(d0_s=d0, d1_s=d1, d2_s=d2)


def _prefill_shapes(most: int) -> list[tuple[int, int]]:
    """Return pairs (tokens to compute, cached tokens) of at most `most` tokens together."""
    clipped = [(min(new, most), cached) for new, cached in _PREFILL_SHAPES]
    return list(dict.fromkeys((new, min(cached, most - new)) for new, cached in clipped))


def _timed(engine: Engine, runs: Sequence[Run]) -> float:
    seconds = least_forward_s(engine, runs, repeats=_REPEATS, long_s=BUDGET_S / 10)
    stage = engine.stage
    weights = stage_weights(layer_counts(engine.layout.n_layers, stage.n_stages))
    return seconds / weights[stage.index]


def _fit(samples: Sequence[tuple[list[float], float]]) -> tuple[float, float, float]:
    """Fit by least squares of relative errors; drop terms with negative coefficients."""
    x: NDArray[Any] = np.array([row for row, _ in samples], dtype=np.float64)
    y: NDArray[Any] = np.array([seconds for _, seconds in samples], dtype=np.float64)
    x, y = x / y[:, None], np.ones_like(y)
    terms = list(range(x.shape[1]))
    while True:
        scale = np.abs(x[:, terms]).max(axis=0)
        solution = np.linalg.lstsq(x[:, terms] / scale, y, rcond=None)[0] / scale
        negative = [term for term, value in zip(terms, solution, strict=True) if value < 0]
        if not negative:
            break
        terms = [term for term in terms if term not in negative]
    full = [0.0] * x.shape[1]
    for term, value in zip(terms, solution, strict=True):
        full[term] = float(value)
    return full[0], full[1], full[2]
