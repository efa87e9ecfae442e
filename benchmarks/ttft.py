"""Measure the gain of a cached prefix: TTFT of a new prompt, and of one with a known prefix."""

import random
import statistics

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running, timed
from benchmarks.model import VOCABULARY, random_model

PROMPT_TOKENS = (512, 2000, 8000)


def run(console: Console, rounds: int = 5, seed: int = 1) -> None:
    """Measure on a model of 27 million parameters, 1 prefill, 1 decode, 1 kvstore."""
    dice = random.Random(seed)
    table = Table(title=f"TTFT, medians of {rounds}, seed {seed}", box=None)
    for column in ("prompt tokens", "miss", "hit", "hit/miss", "cached tokens", "TBT after it"):
        table.add_column(column, justify="right")
    with random_model() as model, running(model) as url, httpx.Client() as client:
        timed(client, url, dice.choices(VOCABULARY, k=64), 4)  # warm
        for n in PROMPT_TOKENS:
            misses: list[Timing] = []
            hits: list[Timing] = []
            for _ in range(rounds):
                prefix = dice.choices(VOCABULARY, k=n)
                misses.append(timed(client, url, [*prefix, 5], 16))
                hits.append(timed(client, url, [*prefix, 6], 16))
            miss = statistics.median(t.ttft_s for t in misses)
            hit = statistics.median(t.ttft_s for t in hits)
            table.add_row(
                str(n + 1),
                f"{miss * 1e3:.0f} ms",
                f"{hit * 1e3:.0f} ms",
                f"{hit / miss:.2f}",
                str(hits[-1].n_cached),
                f"{statistics.median(t.tbt_s for t in hits) * 1e3:.1f} ms",
            )
    console.print(table)
