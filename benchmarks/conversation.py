"""Measure what the KV of answers is worth: conversations, with answers kept at the pool and not.

A turn's prompt is the former prompt, the answer to it and a new message, as token ids. So what may
be cached of it is all that comes before the new message. Both clusters get the same conversations,
one after the other; between two turns passes the time in which a reader would type.
"""

import random
import statistics
import time

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running, timed
from benchmarks.model import VOCABULARY, random_model

N_TURNS = 8
ANSWER_TOKENS = 400
MESSAGE_TOKENS = 100
#: Seconds between the end of an answer and the next message.
PAUSE_S = 1.0


def run(console: Console, rounds: int = 3, seed: int = 1) -> None:
    """Measure on a model of 27 million parameters, 1 prefill, 1 decode, 1 kvstore."""
    with random_model() as model:
        kept = _conversations(model, rounds, seed, keep_answers=True)
        alone = _conversations(model, rounds, seed, keep_answers=False)
    table = Table(
        title=f"{N_TURNS} turns: messages of {MESSAGE_TOKENS}, answers of {ANSWER_TOKENS} tokens,"
        f" medians of {rounds} conversations, seed {seed}",
        box=None,
    )
    for column in (
        "turn",
        "tokens before its message",
        "cached",
        "share",
        "share, prompts alone",
        "TTFT",
        "TTFT, prompts alone",
        "ratio",
        "TBT",
        "TBT, prompts alone",
    ):
        table.add_column(column, justify="right")
    for turn in range(N_TURNS):
        n_before = turn * (MESSAGE_TOKENS + ANSWER_TOKENS)
        with_answers, without = kept[turn], alone[turn]
        ttft_s, ttft_alone_s = (
            statistics.median(t.ttft_s for t in timings) for timings in (with_answers, without)
        )
        tbt_s, tbt_alone_s = (
            statistics.median(t.tbt_s for t in timings) for timings in (with_answers, without)
        )
        table.add_row(
            str(turn + 1),
            str(n_before),
            str(min(t.n_cached for t in with_answers)),
            _share(with_answers, n_before),
            _share(without, n_before),
            f"{ttft_s * 1e3:.0f} ms",
            f"{ttft_alone_s * 1e3:.0f} ms",
            f"{ttft_s / ttft_alone_s:.2f}",
            f"{tbt_s * 1e3:.2f} ms",
            f"{tbt_alone_s * 1e3:.2f} ms",
        )
    console.print(table)


def _conversations(model: str, rounds: int, seed: int, *, keep_answers: bool) -> list[list[Timing]]:
    """Have the conversations on a cluster of their own; the timings of each turn."""
    dice = random.Random(seed)
    turns: list[list[Timing]] = [[] for _ in range(N_TURNS)]
    extra = {"decode": ["--keep-answers" if keep_answers else "--no-keep-answers"]}
    with running(model, extra=extra) as url, httpx.Client() as client:
        timed(client, url, dice.choices(VOCABULARY, k=64), 4)  # warm
        for _ in range(rounds):
            said: list[int] = []
            for timings in turns:
                said += dice.choices(VOCABULARY, k=MESSAGE_TOKENS)
                timings.append(timed(client, url, said, ANSWER_TOKENS))
                said += timings[-1].token_ids
                time.sleep(PAUSE_S)
    return turns


def _share(timings: list[Timing], n_before: int) -> str:
    """The least share of the tokens before a turn's message that was cached."""
    return f"{min(t.n_cached for t in timings) / n_before:.3f}" if n_before else "–"
