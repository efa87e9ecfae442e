"""Draw a token by its scores, after temperature, min-p, top-k and top-p.

Min-p and top-k are read off the scores; the weights of the tokens that they leave are defined in
`exact_weights`, so that the same seed draws the same token on any worker. Only tokens that may
survive are gathered and sorted: a nucleus is a few hundred of a vocabulary of 150,000. A row is
drawn alone, so its draw is the same in any batch.

The extension draws the same tokens, without a sort (src/sampling.inl); tests hold the two together.
"""

import math

import numpy as np
from numpy.typing import NDArray

from halfmoon_engine.sampling.exact_weights import Scores, effective_temperature, exact_weights
from halfmoon_protocol.sampling import Sampling

Tokens = NDArray[np.intp]
#: True for each token that is allowed: [vocab].
AllowedTokens = NDArray[np.bool_]

#: Weights that are cumulated at once; more are drawn by the sums of blocks first.
_BLOCK = 4096
#: Least weights, the highest being 1, of the tokens that are looked at. The next one is tried when
#: there are too few.
_FLOORS = (1e-2, 1e-3, 1e-4, 1e-6)


def is_greedy(sampling: Sampling) -> bool:
    """Return whether the likeliest token is taken, without a draw."""
    return sampling.temperature == 0 or sampling.top_k == 1


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
    temperature = effective_temperature(sampling.temperature)
    tokens: Tokens | None = None
    if sampling.min_p > 0:
        tokens = np.flatnonzero(scores >= _below(highest, min_p_gap(sampling)))
        scores = scores[tokens]
    if 0 < sampling.top_k < scores.shape[0]:
        left = _best(scores, highest, temperature, sampling.top_k)
        tokens, scores = left if tokens is None else tokens[left], scores[left]
    weights = exact_weights(scores, highest, temperature)
    if sampling.top_p < 1:
        left = _nucleus(scores, weights, highest, temperature, sampling.top_p)
        tokens, weights = left if tokens is None else tokens[left], weights[left]
    return tokens, weights


def min_p_gap(sampling: Sampling) -> float:
    """Return how far below the highest score a token may be; -inf where min-p leaves all."""
    if sampling.min_p <= 0:
        return -math.inf
    return effective_temperature(sampling.temperature) * math.log(sampling.min_p)


def _below(highest: np.float32, gap: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(float(highest) + gap)


def _best(scores: Scores, highest: np.float32, temperature: float, n: int) -> Tokens:
    """Return the places of the `n` highest scores, rising."""
    for floor in _FLOORS[2:]:  # the higher ones rarely have enough, and each costs a look at all
        places = np.flatnonzero(scores >= _below(highest, temperature * math.log(floor)))
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


def _nucleus(
    scores: Scores, weights: Scores, highest: np.float32, temperature: float, share: float
) -> Tokens:
    """Return the places of the highest scores whose weights reach a share of all, rising."""
    wanted = share * _sum(weights)
    for floor in _FLOORS:
        places = np.flatnonzero(scores >= _below(highest, temperature * math.log(floor)))
        if _sum(weights[places]) >= wanted:
            break
    else:
        places = np.flatnonzero(weights)
    order = np.argsort(-scores[places], kind="stable")
    ordered = weights[places[order]].astype(np.float64)
    # A token stays if those before it don't reach the share.
    before = np.cumsum(ordered) - ordered
    return np.sort(places[order[: max(1, int(before.searchsorted(wanted)))]])


def _sum(weights: Scores) -> float:
    return float(weights.sum(dtype=np.float64))


def pick_weighted(weights: Scores, die: float) -> int:
    """Return the first place at which the cumulated weights pass a share of their sum.

    Args:
        weights: multiples of 2^-33 whose sums are exact, at least one above 0.
        die: the share, in [0, 1).
    """
    starts = np.arange(0, len(weights), _BLOCK)
    edges = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    mass = die * edges[-1]
    block = min(int(edges.searchsorted(mass, side="right")), len(edges) - 1)
    first = block * _BLOCK
    before = edges[block - 1] if block else 0.0
    inside = before + np.cumsum(weights[first : first + _BLOCK], dtype=np.float64)
    place = first + int(inside.searchsorted(mass, side="right"))
    # Of more than 2^20 weights the sums are rounded, and may end below the mass.
    return min(place, int(np.flatnonzero(weights)[-1])) if place == len(weights) else place
