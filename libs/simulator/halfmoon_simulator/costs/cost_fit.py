"""Fit the cost formulas' coefficients to timed points: least squares of relative errors.

A negative coefficient would predict that more work takes less time. So a term with a negative
coefficient is left out, and the rest is fitted again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon_protocol.messages import DecodeCost, PrefillCost


def fit_prefill(points: Sequence[tuple[int, int, float]]) -> PrefillCost:
    """c0 + c1·(n-p) + c2·(n²-p²) through points (n tokens, p of them cached, seconds)."""
    rows = [[1.0, n - p, float(n) ** 2 - float(p) ** 2] for n, p, _ in points]
    c0, c1, c2 = _fit(rows, [seconds for _, _, seconds in points])
    return PrefillCost(c0_s=c0, c1_s=c1, c2_s=c2)


def fit_decode(points: Sequence[tuple[int, int, float]]) -> DecodeCost:
    """d0 + d1·b + d2·c through points (b requests, c context tokens in all, seconds)."""
    rows = [[1.0, float(b), float(c)] for b, c, _ in points]
    d0, d1, d2 = _fit(rows, [seconds for _, _, seconds in points])
    return DecodeCost(d0_s=d0, d1_s=d1, d2_s=d2)


def largest_relative_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative error of pairs (predicted, measured)."""
    return max((abs(predicted / measured - 1) for predicted, measured in pairs), default=0.0)


def _fit(rows: list[list[float]], seconds: list[float]) -> tuple[float, float, float]:
    if not rows:
        raise ValueError("no points to fit")
    x: NDArray[Any] = np.array(rows) / np.array(seconds)[:, None]
    terms = [0, 1, 2]
    while True:
        scale = np.abs(x[:, terms]).max(axis=0)
        solution = np.linalg.lstsq(x[:, terms] / scale, np.ones(len(seconds)), rcond=None)[0]
        solution = solution / scale
        negative = [term for term, value in zip(terms, solution, strict=True) if value < 0]
        if not negative:
            break
        terms = [term for term in terms if term not in negative]
    full = [0.0, 0.0, 0.0]
    for term, value in zip(terms, solution, strict=True):
        full[term] = float(value)
    return full[0], full[1], full[2]
