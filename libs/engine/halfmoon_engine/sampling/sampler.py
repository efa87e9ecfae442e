"""Choose tokens from logits, row by row of a batch, each row by its own parameters.

The order is vLLM's: biases, penalties, masks, temperature, min-p, top-k, top-p, draw. A row's
draw takes one number from a counter-based generator keyed by (seed, position). So equal logits give
the same token in any batch, on any worker, with or without the extension, and when it is repeated.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from halfmoon_engine.interface import Draw
from halfmoon_engine.sampling.exact_weights import Scores
from halfmoon_engine.sampling.native_draw import choose_natively
from halfmoon_engine.sampling.weighted_draw import AllowedTokens, draw_token, is_greedy

_WORD = 2**64 - 1


def choose_tokens(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    allowed: Mapping[int, AllowedTokens] = MappingProxyType({}),
    native: Any | None = None,
) -> list[int]:
    """Choose one token per row.

    Args:
        logits: [n_rows, vocab], of any float type.
        draws: how to choose each.
        positions: of the token to choose, in its sequence: what its dice are keyed by.
        allowed: by row, the tokens that its grammar allows; rows without one may draw any.
        native: the extension's module, which chooses the same tokens faster; None: numpy does.
    """
    allowed = _with_masked(draws, allowed, logits.shape[-1])
    greedy = [is_greedy(draw.sampling) for draw in draws]
    changed = [
        i in allowed or draw.sampling.penalises or bool(draw.sampling.logit_bias)
        for i, draw in enumerate(draws)
    ]
    if logits.device.type != "cpu" and all(greedy) and not any(changed):
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    scores: Scores = logits.float().cpu().numpy()
    if native is not None:
        dice = [
            0.0 if first else uniform_draw(draw.sampling.seed, position)
            for first, draw, position in zip(greedy, draws, positions, strict=True)
        ]
        masks = [allowed.get(i) for i in range(len(draws))]
        return choose_natively(native, scores, draws, dice, masks)
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


def _with_masked(
    draws: Sequence[Draw], allowed: Mapping[int, AllowedTokens], n_vocab: int
) -> Mapping[int, AllowedTokens]:
    """Return the allowed tokens of rows, without those that a draw masks; by row, as `allowed`.

    Where the grammar leaves none but masked tokens, they stay.
    """
    masking = [row for row, draw in enumerate(draws) if draw.masked]
    if not masking:
        return allowed
    left = dict(allowed)
    for row in masking:
        known = allowed.get(row)
        may_come = np.ones(n_vocab, dtype=np.bool_) if known is None else known.copy()
        may_come[[token for token in draws[row].masked if token < n_vocab]] = False
        if may_come.any():
            left[row] = may_come
    return left


def adjust_scores(scores: Scores, draw: Draw, may_come: AllowedTokens | None = None) -> Scores:
    """Apply the biases, penalties and mask of one row to its scores in place; return them.

    Args:
        scores: [vocab]
        draw: with the tokens so far, if it penalises them.
        may_come: tokens that the row's grammar and its mask allow; None: all.
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
    """Return the number in [0, 1) of a seed and a position: Philox-4x64 keyed by both.

    It is the first of numpy's `Philox(key=[seed, position])`, whose making takes longer than that.
    """
    a, b, c, d, first_key, second_key = 1, 0, 0, 0, seed, position
    for _ in range(10):
        x, y = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (y >> 64) ^ b ^ first_key, y & _WORD, (x >> 64) ^ d ^ second_key, x & _WORD
        first_key = (first_key + 0x9E3779B97F4A7C15) & _WORD
        second_key = (second_key + 0xBB67AE8584CAA73B) & _WORD
    return (a >> 11) * 2.0**-53
