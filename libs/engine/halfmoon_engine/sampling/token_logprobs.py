"""Report log probabilities of chosen tokens and of prompt tokens.

A forward's logits have a row for each run that draws a token, then the rows of each run that scores
known tokens. The draws are not changed.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import Draw, OnLogprobs, Run, TokenResult
from halfmoon_protocol.logprobs import TokenScore

#: Logits that are turned into probabilities at once; float32, so 64 MiB.
_LOGITS_AT_ONCE = 16 * 1024 * 1024


def logprob_rows(runs: Sequence[Run]) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each run whose next tokens are known and scored."""
    start = 0
    for run in runs:
        if run.scoring is not None:
            yield np.arange(start, start + len(run.scoring.targets))
        start += len(run.token_ids)


def report_prompt_logprobs(
    logits: torch.Tensor, runs: Sequence[Run], chosen: Sequence[TokenResult | None]
) -> None:
    """Report the scores that each run asks for.

    Args:
        logits: [n_drawn + n_scored, vocab]; rows of drawn tokens, then `logprob_rows`.
        runs: the batch.
        chosen: the token of each run; None for runs that draw none.
    """
    start = 0
    for run, token in zip(runs, chosen, strict=True):
        if run.draw is None:
            continue
        if isinstance(token, int):
            report_drawn_logprob(logits[start], run.draw, token)
        start += 1
    for run in runs:
        if (scoring := run.scoring) is not None:
            stop = start + len(scoring.targets)
            _report(logits[start:stop], scoring.targets, scoring.n_top, scoring.on_logprobs)
            start = stop


def report_drawn_logprob(logits: torch.Tensor, draw: Draw, token: int) -> None:
    """Report the score of a drawn token if its draw wants it; logits are its row, [vocab]."""
    if draw.sampling.logprobs is not None and draw.on_logprobs is not None:
        _report(logits[None], [token], draw.sampling.logprobs, draw.on_logprobs)


def _report(logits: torch.Tensor, tokens: Sequence[int], n_top: int, report: OnLogprobs) -> None:
    step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    scores: list[TokenScore] = []
    for start in range(0, len(tokens), step):
        scores += compute_logprobs(
            logits[start : start + step], tokens[start : start + step], n_top
        )
    report(scores)


def compute_logprobs(logits: torch.Tensor, tokens: Sequence[int], n_top: int) -> list[TokenScore]:
    """Compute one score per row.

    Args:
        logits: [n, vocab], of any float type.
        tokens: the scored token of each row.
        n_top: likeliest tokens to name.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    targets = torch.as_tensor(tokens, device=logits.device)[:, None]
    own = logprobs.gather(1, targets)
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = logprobs.topk(min(n_top, logits.shape[1]), dim=-1)
    return [
        TokenScore(logprob, rank, tuple(zip(top_ids, top_values, strict=True)))
        for logprob, rank, top_ids, top_values in zip(
            own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]
