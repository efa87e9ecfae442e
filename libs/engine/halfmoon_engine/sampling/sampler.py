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
from halfmoon_engine.sampling.weighted_draw import Scores, draw_token

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
    changed = [
        i in allowed or draw.sampling.penalises or bool(draw.sampling.logit_bias)
        for i, draw in enumerate(draws)
    ]
    if logits.device.type != "cpu" and all(greedy) and not any(changed):
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    scores: Scores = logits.float().cpu().numpy()
    if all(greedy) and not any(changed):
        return [int(token) for token in scores.argmax(axis=1)]
    tokens: list[int] = []
    for i, (draw, position) in enumerate(zip(draws, positions, strict=True)):
        row = scores[i]
        if changed[i]:
            row = adjust_scores(row.copy(), draw, allowed.get(i))
        if greedy[i]:
            tokens.append(int(row.argmax()))
        else:
            die = uniform_draw(draw.sampling.seed, position)
            tokens.append(draw_token(row, draw.sampling, die))
    return tokens


def adjust_scores(scores: Scores, draw: Draw, may_come: AllowedTokens | None = None) -> Scores:
    """Apply the biases, penalties and grammar of one row to its scores in place; return them.

    Args:
        scores: [vocab]
        draw: with the tokens so far, if it penalises them.
        may_come: tokens that the row's grammar allows; None: all.
    """
    if draw.sampling.logit_bias:
        tokens, biases = zip(*draw.sampling.logit_bias, strict=True)
        scores[list(tokens)] += np.array(biases, dtype=np.float32)
    if draw.sampling.penalises:
        apply_penalties(scores, draw)
    if may_come is not None:
        scores[~may_come] = -np.inf
    return scores


def apply_penalties(scores: Scores, draw: Draw) -> None:
    """Apply the penalties of one row to its scores, [vocab], in place.

    Repetition divides (or, below zero, multiplies) scores of all tokens so far; presence and
    frequency are subtracted for tokens of the output.
    """
    sampling = draw.sampling
    history = np.asarray(draw.history, dtype=np.int64)
    if sampling.repetition_penalty != 1:
        old = scores[history]
        penalty = sampling.repetition_penalty
        scores[history] = np.where(old > 0, old / penalty, old * penalty)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        tokens, counts = np.unique(history[draw.n_prompt :], return_counts=True)
        scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def uniform_draw(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position: Philox-4x64 keyed by both."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53
