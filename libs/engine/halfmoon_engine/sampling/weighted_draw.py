"""Draw a token by its scores, after temperature, min-p, top-k and top-p.

Min-p and top-k are read off the scores; then a score's weight is exp((score - highest) /
temperature), in float32. Only tokens that may survive are gathered and sorted: a nucleus is a few
hundred of a vocabulary of 150,000. A row is drawn alone, so its draw is the same in any batch.
"""

import math

import numpy as np
from numpy.typing import NDArray

from halfmoon_protocol.sampling import Sampling

Scores = NDArray[np.float32]
Tokens = NDArray[np.intp]

#: Weights that are cumulated at once; more are drawn by the sums of blocks first.
_BLOCK = 4096
#: Least weights, the highest being 1, of the tokens that are looked at. The next one is tried when
#: there are too few.
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-6)
#: The least normal float32; smaller temperatures would be zero.
_LEAST_TEMPERATURE = 1.2e-38


def draw_token(scores: Scores, sampling: Sampling, die: float) -> int:
    """Draw a token.

    Args:
        scores: [vocab], -inf for tokens that must not come. Of a row without a highest finite
            score, any token may come.
        sampling: a temperature above 0, and what is left out.
        die: a number in [0, 1).
    """
    if not math.isfinite(scores.max()):
        return int(die * scores.shape[0])
    tokens, weights = likely_tokens(scores, sampling)
    place = pick_weighted(weights, die)
    return place if tokens is None else int(tokens[place])


def likely_tokens(scores: Scores, sampling: Sampling) -> tuple[Tokens | None, Scores]:
    """Return the tokens that min-p, top-k and top-p leave, rising, and their weights.

    Of equal scores the lower token is the likelier. Tokens are None when all are left.
    """
    highest = scores.max()
    temperature = max(sampling.temperature, _LEAST_TEMPERATURE)
    tokens: Tokens | None = None
    if sampling.min_p > 0:
        tokens = np.flatnonzero(scores >= highest + temperature * math.log(sampling.min_p))
        scores = scores[tokens]
    if 0 < sampling.top_k < scores.shape[0]:
        left = _best(scores, highest, temperature, sampling.top_k)
        tokens, scores = left if tokens is None else tokens[left], scores[left]
    weights = scores - highest
    with np.errstate(over="ignore", under="ignore"):  # losers: -inf at a tiny temperature, then 0
        if temperature != 1:
            weights /= np.float32(temperature)
        np.exp(weights, out=weights)
    if sampling.top_p < 1:
        left = _nucleus(weights, sampling.top_p)
        tokens, weights = left if tokens is None else tokens[left], weights[left]
    return tokens, weights


def _best(scores: Scores, highest: np.float32, temperature: float, n: int) -> Tokens:
    """Return the places of the `n` highest scores, rising."""
    for floor in _FLOORS[2:]:  # the higher ones rarely have enough, and each costs a look at all
        places = np.flatnonzero(scores >= highest + temperature * math.log(floor))
        if len(places) >= n:
            break
    else:
        places = np.flatnonzero(scores > -np.inf)
    if len(places) <= n:
        return places
    values = scores[places]
    least = np.partition(values, len(values) - n)[len(values) - n]
    above = values > least
    above[np.flatnonzero(values == least)[: n - np.count_nonzero(above)]] = True
    best: Tokens = places[above]
    return best


def _nucleus(weights: Scores, share: float) -> Tokens:
    """Return the places of the fewest weights whose sum reaches a share of all, rising."""
    wanted = share * float(weights.sum())
    for floor in _FLOORS:
        places = np.flatnonzero(weights >= floor)
        if float(weights[places].sum()) >= wanted:
            break
    else:
        places = np.flatnonzero(weights)
    values = weights[places]
    order = np.argsort(-values, kind="stable")
    ordered = values[order].astype(np.float64)
    # A token stays if those before it don't reach the share.
    before = np.cumsum(ordered) - ordered
    return np.sort(places[order[: max(1, int(before.searchsorted(wanted)))]])


def pick_weighted(weights: Scores, die: float) -> int:
    """Return the place at which the cumulated weights pass a share of their sum.

    Args:
        weights: at least one is above 0.
        die: the share, in [0, 1).
    """
    first = 0
    if len(weights) > _BLOCK:
        whole = len(weights) // _BLOCK * _BLOCK
        sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1)
        edges = np.cumsum([*sums, weights[whole:].sum()], dtype=np.float64)
        # By rounding, a share may be the whole; then the last block with a weight has it.
        last = edges.searchsorted(edges[-1])
        block = int(min(edges.searchsorted(die * edges[-1], side="right"), last))
        before, after = (edges[block - 1] if block else 0.0), edges[block]
        first, die = block * _BLOCK, (die * edges[-1] - before) / (after - before)
        weights = weights[first : first + _BLOCK]
    mass = np.cumsum(weights, dtype=np.float64)
    place = int(mass.searchsorted(die * mass[-1], side="right"))
    if place == len(weights):  # by rounding
        place = int(np.flatnonzero(weights)[-1])
    return first + place
