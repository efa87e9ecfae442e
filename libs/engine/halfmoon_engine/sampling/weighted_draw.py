"""Draw tokens by their scores, after min-p, top-k and top-p.

A row of scores becomes weights, exp((score - highest) / temperature), in float32. Only tokens that
may survive top-k or top-p are sorted: a nucleus is a few hundred of a vocabulary of 150,000. A row
without them is drawn by sums of blocks, then within one block.

Each row is computed alike whatever stands beside it, so its draw is the same in any batch.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon_protocol.sampling import Sampling

Scores = NDArray[np.float32]

#: Weights of a group of rows: they should stay in the processor's cache.
_GROUP_ELEMENTS = 1 << 18
_BLOCK = 512
#: Least weights of the tokens that are sorted; the next one is tried when there are too few.
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-6)
#: The least normal float32; smaller temperatures would be zero.
_LEAST_TEMPERATURE = 1.2e-38


def draw_tokens(
    rows: Sequence[Scores], samplings: Sequence[Sampling], dice: Sequence[float]
) -> list[int]:
    """Draw one token of each row.

    Args:
        rows: scores of each, [vocab]; -inf for tokens that must not come.
        samplings: temperatures above 0, and what is left out.
        dice: a number in [0, 1) for each row.
    """
    at_once = max(1, _GROUP_ELEMENTS // rows[0].shape[0])
    tokens: list[int] = []
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        tokens += _draw_group(rows[part], samplings[part], dice[part])
    return tokens


def _draw_group(
    rows: Sequence[Scores], samplings: Sequence[Sampling], dice: Sequence[float]
) -> list[int]:
    n_vocab = rows[0].shape[0]
    weights = _weights(rows, samplings)
    blocks = weights.reshape(len(rows), -1, _BLOCK)
    tokens = [0] * len(rows)
    whole: list[int] = []
    for j, sampling in enumerate(samplings):
        if 0 < sampling.top_k < n_vocab or sampling.top_p < 1:
            tokens[j] = _draw_likely(weights[j], sampling, dice[j])
        else:
            whole.append(j)
    if whole:
        sums = (blocks if len(whole) == len(rows) else blocks[whole]).sum(axis=2)
        for j, edges in zip(whole, np.cumsum(sums, axis=1, dtype=np.float64), strict=True):
            tokens[j] = _draw_any(blocks[j], edges, dice[j])
    return tokens


def _weights(rows: Sequence[Scores], samplings: Sequence[Sampling]) -> Scores:
    """Return weights in whole blocks, [n_rows, n_blocks * _BLOCK]; 0 beyond the vocabulary."""
    n_vocab = rows[0].shape[0]
    weights = np.zeros((len(rows), -(-n_vocab // _BLOCK) * _BLOCK), dtype=np.float32)
    live = weights[:, :n_vocab]
    for j, row in enumerate(rows):
        live[j] = row
    temperatures = np.array([each.temperature for each in samplings])
    temperatures = np.maximum(temperatures, _LEAST_TEMPERATURE).astype(np.float32)
    peaks = live.max(axis=1, keepdims=True)
    if not np.isfinite(peaks).all():
        # Scores of a broken model. A row of them draws any token.
        broken = ~np.isfinite(peaks[:, 0])
        live[broken], peaks[broken] = 0.0, 0.0
    with np.errstate(all="ignore"):  # losers become -inf at a tiny temperature, and 0
        # Shifted first: the winner stays 0, whatever the temperature.
        live -= peaks
        live /= temperatures[:, None]
        np.exp(live, out=live)
    if any(each.min_p > 0 for each in samplings):
        floors = np.array([each.min_p for each in samplings], dtype=np.float32)
        np.copyto(live, 0.0, where=live < floors[:, None])
    return weights


def _draw_any(blocks: Scores, edges: NDArray[np.float64], die: float) -> int:
    """Draw by weights in blocks, [n_blocks, _BLOCK], whose sums cumulate to `edges`."""
    aim = die * edges[-1]
    block = int(edges.searchsorted(aim, side="right"))
    if block == len(edges):  # by rounding
        return int(np.flatnonzero(blocks)[-1])
    inner = np.cumsum(blocks[block], dtype=np.float64)
    if block:
        aim -= edges[block - 1]
    place = int(inner.searchsorted(aim, side="right"))
    if place == _BLOCK:
        place = int(np.flatnonzero(blocks[block])[-1])
    return block * _BLOCK + place


def _draw_likely(weights: Scores, sampling: Sampling, die: float) -> int:
    """Draw among the tokens that top-k and top-p leave."""
    tokens = likely_tokens(weights, sampling.top_k, sampling.top_p)
    mass = np.cumsum(weights[tokens], dtype=np.float64)
    place = int(mass.searchsorted(die * mass[-1], side="right"))
    return int(tokens[min(place, len(tokens) - 1)])


def likely_tokens(weights: Scores, top_k: int, top_p: float) -> NDArray[np.intp]:
    """Return the tokens that top-k, and then top-p of their mass, leave; rising.

    Of equal weights the lower token is the likelier. At least one of the two leaves tokens out.

    Args:
        weights: of all tokens, not normalised; the highest is 1.
        top_k: 0 keeps all.
        top_p: the smallest set whose mass reaches this share is left.
    """
    total = 0.0 if top_k else float(weights.sum())
    tokens = _candidates(weights, top_k, top_p * total)
    values = weights[tokens]
    if 0 < top_k < len(tokens):
        least = np.partition(values, len(values) - top_k)[len(values) - top_k]
        tokens = tokens[values >= least]
        values = weights[tokens]
    order = np.argsort(-values, kind="stable")[: top_k or None]
    if top_p < 1:
        ordered = values[order].astype(np.float64)
        # A token stays if those before it don't reach the share.
        before = np.cumsum(ordered) - ordered
        n_left = int(before.searchsorted(top_p * (total or float(ordered.sum()))))
        order = order[: max(1, n_left)]
    return np.sort(tokens[order])


def _candidates(weights: Scores, top_k: int, mass: float) -> NDArray[np.intp]:
    """Return the likeliest tokens: at least `top_k`, or if that is 0 of at least this mass."""
    for floor in _FLOORS:
        tokens = np.flatnonzero(weights >= floor)
        if len(tokens) >= top_k > 0 or (not top_k and float(weights[tokens].sum()) >= mass):
            return tokens
    return np.flatnonzero(weights)
