"""Choose tokens from logits, row by row of a batch, each row by its own parameters.

The order is vLLM's: biases, penalties, grammar, temperature, min-p, top-k, top-p, draw. A row's
draw takes one number from a counter-based generator keyed by (seed, position). So it is the same in
any batch, on any worker, and when it is repeated.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw

#: True for each token that is allowed: [vocab].
AllowedTokens = NDArray[np.bool_]


def choose_tokens(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    allowed: Mapping[int, AllowedTokens] = MappingProxyType({}),
) -> list[int]:
    """Choose one token per row.

    Args:
        logits: [n_rows, vocab], of any float type.
        draws: how to choose each.
        positions: of the token to choose, in its sequence: what its dice are keyed by.
        allowed: by row, the tokens that its grammar allows; rows without one may draw any.
    """
    greedy = [draw.sampling.temperature == 0 or draw.sampling.top_k == 1 for draw in draws]
    penalised = [i for i, draw in enumerate(draws) if draw.sampling.penalises]
    biased = [i for i, draw in enumerate(draws) if draw.sampling.logit_bias]
    if all(greedy) and not penalised and not biased and not allowed:
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    scores = logits.float().cpu()
    if (penalised or biased or allowed) and scores.data_ptr() == logits.data_ptr():
        scores = scores.clone()  # the caller's logits stay as they are
    for i in biased:
        tokens_of, biases = zip(*draws[i].sampling.logit_bias, strict=True)
        scores[i, torch.tensor(tokens_of)] += torch.tensor(biases)
    for i in penalised:
        scores[i] = apply_penalties(scores[i], draws[i])
    for i, may_come in allowed.items():
        scores[i, torch.from_numpy(~may_come)] = -torch.inf
    tokens = scores.argmax(dim=-1)
    drawn = [i for i, is_greedy in enumerate(greedy) if not is_greedy]
    if drawn:
        rows = scores[drawn]
        temperatures = torch.tensor([draws[i].sampling.temperature for i in drawn])
        # Shifted first: a tiny temperature makes losers -inf, and never the winner inf.
        rows = (rows - rows.max(dim=-1, keepdim=True).values) / temperatures[:, None]
        rows = mask_unlikely(rows, [draws[i] for i in drawn])
        dice = [uniform_draw(draws[i].sampling.seed, positions[i]) for i in drawn]
        tokens[drawn] = pick_tokens(rows, dice)
    return [int(token) for token in tokens.tolist()]


def apply_penalties(scores: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Apply the penalties of one row to its scores, and return them.

    Repetition divides (or, below zero, multiplies) scores of all tokens so far; presence and
    frequency are subtracted for tokens of the output.
    """
    sampling, n_vocab = draw.sampling, scores.shape[0]
    history = torch.as_tensor(np.asarray(draw.history, dtype=np.int64))
    if sampling.repetition_penalty != 1:
        seen = torch.as_tensor(np.unique(draw.history))
        old = scores[seen]
        penalty = sampling.repetition_penalty
        scores = scores.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        counts = history[draw.n_prompt :].bincount(minlength=n_vocab).to(scores.dtype)
        scores = scores - sampling.frequency_penalty * counts
        scores = scores - sampling.presence_penalty * (counts > 0)
    return scores


def mask_unlikely(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return scores with -inf for tokens that min-p, top-k or top-p leave out.

    Only rows that ask for it are touched, and only those with top-k or top-p are sorted.
    """
    min_p = torch.tensor([draw.sampling.min_p for draw in draws])
    if bool((min_p > 0).any()):
        floor = scores.max(dim=-1, keepdim=True).values + min_p.log()[:, None]
        scores = scores.masked_fill(scores < floor, -torch.inf)
    n_vocab = scores.shape[1]
    cut = [
        i
        for i, draw in enumerate(draws)
        if 0 < draw.sampling.top_k < n_vocab or draw.sampling.top_p < 1
    ]
    if not cut:
        return scores
    ordered, order = scores[cut].sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([draws[i].sampling.top_k or n_vocab for i in cut])
    dropped = torch.arange(n_vocab) >= top_k[:, None]
    ordered = ordered.masked_fill(dropped, -torch.inf)
    probabilities = ordered.double().softmax(dim=-1)
    top_p = torch.tensor([draws[i].sampling.top_p for i in cut], dtype=torch.float64)
    # The smallest set whose mass reaches top_p: a token stays if those before it don't reach it.
    before = probabilities.cumsum(dim=-1) - probabilities
    dropped |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, -torch.inf)
    scores = scores.clone()
    scores[cut] = torch.empty_like(kept).scatter_(1, order, kept)
    return scores


def pick_tokens(scores: torch.Tensor, dice: Sequence[float]) -> torch.Tensor:
    """Pick the token of each row at which the cumulated probability passes a number in [0, 1)."""
    mass = scores.double().softmax(dim=-1).cumsum(dim=-1)
    aim = torch.tensor(dice, dtype=torch.float64) * mass[:, -1]
    return torch.searchsorted(mass, aim[:, None], right=True)[:, 0].clamp_(max=scores.shape[1] - 1)


def uniform_draw(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position: Philox-4x64 keyed by both."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
