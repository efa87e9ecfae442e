"""Report log probabilities of chosen tokens and of prompt tokens.

A forward's logits have a row for each run that draws a token, then the rows of each run that scores
known tokens. The draws are not changed.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw, Run, TokenResult
from halfmoon_engine.sampling.exact_weights import Scores
from halfmoon_engine.sampling.native_draw import score_natively
from halfmoon_protocol.logprobs import TokenScore

#: Logits that are turned into probabilities at once; float32, so 64 MiB.
_LOGITS_AT_ONCE = 16 * 1024 * 1024
#: Distances from the highest logit within which the likeliest tokens are looked for, in turn.
_GAPS = (5.0, 10.0, 20.0, math.inf)


def logprob_rows(runs: Sequence[Run]) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each run whose next tokens are known and scored."""
    start = 0
    for run in runs:
        if run.scoring is not None:
            yield np.arange(start, start + len(run.scoring.targets))
        start += len(run.token_ids)


def report_prompt_logprobs(
    logits: torch.Tensor,
    runs: Sequence[Run],
    chosen: Sequence[TokenResult | None],
    native: Any | None = None,
) -> None:
    """Report the scores that each run asks for.

    Args:
        logits: [n_drawn + n_scored, vocab]; rows of drawn tokens, then `logprob_rows`.
        runs: the batch.
        chosen: the token of each run; None for runs that draw none.
        native: the extension's module; None: numpy computes.
    """
    drawn = [
        (run.draw, token) for run, token in zip(runs, chosen, strict=True) if run.draw is not None
    ]
    start = len(drawn)
    _report_drawn(logits[:start], drawn, native)
    for run in runs:
        if (scoring := run.scoring) is not None:
            stop = start + len(scoring.targets)
            scores = _score_all(logits[start:stop], scoring.targets, scoring.n_top, native)
            scoring.on_logprobs(scores)
            start = stop


def report_drawn_logprob(
    logits: torch.Tensor, draw: Draw, token: int, native: Any | None = None
) -> None:
    """Report the score of a drawn token if its draw wants it; logits are its row, [vocab]."""
    _report_drawn(logits[None], [(draw, token)], native)


def _report_drawn(
    logits: torch.Tensor, drawn: Sequence[tuple[Draw, TokenResult | None]], native: Any | None
) -> None:
    """Score the tokens of all rows that want it at once; rows without a token are left out."""
    wanted = [
        (row, token, draw.sampling.logprobs, draw.on_logprobs)
        for row, (draw, token) in enumerate(drawn)
        if isinstance(token, int)
        and draw.sampling.logprobs is not None
        and draw.on_logprobs is not None
    ]
    if not wanted:
        return
    if len(wanted) < len(drawn):
        logits = logits[[row for row, *_ in wanted]]
    most = max(n_top for _, _, n_top, _ in wanted)
    scores = _score_all(logits, [token for _, token, _, _ in wanted], most, native)
    for score, (_, _, n_top, report) in zip(scores, wanted, strict=True):
        own = score if n_top == most else TokenScore(score.logprob, score.rank, score.top[:n_top])
        report([own])


def _score_all(
    logits: torch.Tensor, tokens: Sequence[int], n_top: int, native: Any | None
) -> list[TokenScore]:
    step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    scores: list[TokenScore] = []
    for start in range(0, len(tokens), step):
        part = slice(start, start + step)
        scores += compute_logprobs(logits[part], tokens[part], n_top, native)
    return scores


def compute_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], n_top: int, native: Any | None = None
) -> list[TokenScore]:
    """Compute one score per row.

    Args:
        logits: [n, vocab], of any float type.
        tokens: the scored token of each row.
        n_top: likeliest tokens to name.
        native: the extension's module; None: numpy computes.
    """
    rows: Scores = logits.float().cpu().numpy()
    known: Sequence[TokenScore | None] = [None] * len(tokens)
    if native is not None:
        known = score_natively(native, rows, tokens, n_top)
    return [
        _score(row, token, n_top) if score is None else score
        for row, token, score in zip(rows, tokens, known, strict=True)
    ]


def _score(logits: Scores, token: int, n_top: int) -> TokenScore:
    """Compute the score of one token; logits are [vocab]."""
    highest = logits.max()
    sum_log = float(highest) + math.log(float(np.exp(logits - highest).sum()))
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    best = _highest(logits, float(highest), n_top)
    logprobs = logits[best].astype(np.float64) - sum_log
    top = tuple(zip(best.tolist(), logprobs.tolist(), strict=True))
    return TokenScore(float(logits[token]) - sum_log, rank, top)


def _highest(logits: Scores, highest: float, n: int) -> NDArray[np.intp]:
    """Return the tokens of the `n` highest logits, highest first; of equal ones the lower token."""
    if n == 0:
        return np.empty(0, dtype=np.intp)
    for gap in _GAPS:
        tokens = np.flatnonzero(logits >= highest - gap)
        if len(tokens) >= min(n, len(logits)):
            break
    return tokens[np.argsort(-logits[tokens], kind="stable")[:n]]
