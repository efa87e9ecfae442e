"""Log probabilities for those who ask: of chosen tokens, and of prompts' own.

A forward's logits have a row for each run that draws a token, then the rows of each run that
is to score known tokens. Nothing here changes what is drawn.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from halfmoon_engine.interface import Report, Run
from halfmoon_protocol.scores import TokenScore

#: Logits that are turned into probabilities at once; float32, so 64 MiB.
_LOGITS_AT_ONCE = 16 * 1024 * 1024


def scored_rows(runs: Sequence[Run]) -> Iterator[NDArray[np.int64]]:
    """Rows of the batch whose followers are known and are to be scored, run by run."""
    start = 0
    for run in runs:
        if run.scoring is not None:
            yield np.arange(start, start + len(run.scoring.targets))
        start += len(run.token_ids)


def report_scores(logits: torch.Tensor, runs: Sequence[Run], chosen: Sequence[int | None]) -> None:
    """Tell each run's asker what it wants to know.

    Args:
        logits: [n_drawn + n_scored, vocab]; drawn tokens' rows, then `scored_rows`.
        runs: the batch.
        chosen: a token for each run that draws.
    """
    drawn = [
        (run.draw, token) for run, token in zip(runs, chosen, strict=True) if token is not None
    ]
    for row, (draw, token) in enumerate(drawn):
        if draw is not None and draw.sampling.logprobs is not None and draw.report is not None:
            _report(logits[row : row + 1], [token], draw.sampling.logprobs, draw.report)
    start = len(drawn)
    for run in runs:
        if (scoring := run.scoring) is not None:
            stop = start + len(scoring.targets)
            _report(logits[start:stop], scoring.targets, scoring.n_top, scoring.report)
            start = stop


def _report(logits: torch.Tensor, tokens: Sequence[int], n_top: int, report: Report) -> None:
    step = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    scores: list[TokenScore] = []
    for start in range(0, len(tokens), step):
        scores += score(logits[start : start + step], tokens[start : start + step], n_top)
    report(scores)


def score(logits: torch.Tensor, tokens: Sequence[int], n_top: int) -> list[TokenScore]:
    """One score per row.

    Args:
        logits: [n, vocab], of any float type.
        tokens: the token whose score is wanted, of each row.
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
