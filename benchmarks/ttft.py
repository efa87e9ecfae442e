"""Measure the gain of a cached prefix: TTFT of a new prompt, and of one with a known prefix.

The stages of a hit are prefill's part of it: asking for blocks and waiting for their layers, the
forward pass, and from there until the landing has all bytes and the fetched blocks are verified.
"""

import random
import statistics

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running, stage_seconds, timed
from benchmarks.model import VOCABULARY, random_model

PROMPT_TOKENS = (512, 2000, 4096, 8000)
STAGES = ("fetch", "prefill", "transfer")


def run(console: Console, rounds: int = 5, seed: int = 1) -> None:
    """Measure on a model of 27 million parameters, 1 prefill, 1 decode, 1 kvstore."""
    dice = random.Random(seed)
    table = Table(title=f"TTFT, medians of {rounds}, seed {seed}", box=None)
    columns = ("prompt tokens", "miss", "hit", "hit/miss", "miss/hit", "cached tokens")
    for column in (*columns, *(f"hit: {stage}" for stage in STAGES), "TBT after it"):
        table.add_column(column, justify="right")
    with random_model() as model, running(model) as url, httpx.Client() as client:
        timed(client, url, dice.choices(VOCABULARY, k=64), 4)  # warm
        for n in PROMPT_TOKENS:
            misses: list[Timing] = []
            hits: list[Timing] = []
            stages: list[dict[str, float]] = []
            for _ in range(rounds):
                prefix = dice.choices(VOCABULARY, k=n)
                misses.append(timed(client, url, [*prefix, 5], 16))
                before = stage_seconds(client, url)
                hits.append(timed(client, url, [*prefix, 6], 16))
                after = stage_seconds(client, url)
                stages.append({stage: after[stage][0] - before[stage][0] for stage in STAGES})
            miss = statistics.median(t.ttft_s for t in misses)
            hit = statistics.median(t.ttft_s for t in hits)
            table.add_row(
                str(n + 1),
                f"{miss * 1e3:.0f} ms",
                f"{hit * 1e3:.0f} ms",
                f"{hit / miss:.3f}",
                f"{miss / hit:.1f}",
                str(hits[-1].n_cached),
                *(
                    f"{statistics.median(s[stage] for s in stages) * 1e3:.1f} ms"
                    for stage in STAGES
                ),
                f"{statistics.median(t.tbt_s for t in hits) * 1e3:.1f} ms",
            )
    console.print(table)
