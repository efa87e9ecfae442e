"""Choose tokens and score them with the extension: what `weighted_draw` and `token_logprobs` do.

The tokens are the same, and the log probabilities agree to about a millionth. Rows run in parallel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfmoon_engine.interface import Draw
from halfmoon_engine.sampling.exact_weights import Scores, exponent_scale
from halfmoon_engine.sampling.weighted_draw import AllowedTokens, is_greedy, min_p_gap
from halfmoon_protocol.logprobs import TokenScore


def choose_natively(
    native: Any,
    scores: Scores,
    draws: Sequence[Draw],
    dice: Sequence[float],
    allowed: Sequence[AllowedTokens | None],
) -> list[int]:
    """Choose one token per row.

    Args:
        native: the extension's module.
        scores: [n_rows, vocab]; changed by biases and penalties meanwhile, and restored.
        draws: how to choose each.
        dice: of each row, a number in [0, 1); not used by greedy rows.
        allowed: of each row, the tokens that its grammar allows; None: all.
    """
    rows = [_row(*each) for each in zip(draws, dice, allowed, strict=True)]
    tokens: list[int] = native.choose_tokens(_contiguous(scores), scores.shape[1], rows)
    return tokens


def score_natively(
    native: Any, scores: Scores, tokens: Sequence[int], n_top: int
) -> list[TokenScore | None]:
    """Compute one score per row; None where a row's highest score is no finite number."""
    results = native.score_tokens(_contiguous(scores), scores.shape[1], tokens, n_top)
    return [None if result is None else TokenScore(*result) for result in results]


def _row(draw: Draw, die: float, allowed: AllowedTokens | None) -> tuple[Any, ...]:
    sampling = draw.sampling
    penalties = None
    if sampling.penalises:
        penalties = (
            draw.history,
            draw.n_prompt,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
    return (
        0.0 if is_greedy(sampling) else exponent_scale(sampling.temperature),
        min_p_gap(sampling),
        sampling.top_k,
        sampling.top_p,
        die,
        sampling.logit_bias or None,
        penalties,
        allowed,
    )


def _contiguous(scores: Scores) -> Scores:
    return np.ascontiguousarray(scores)
