"""Measure the control plane's share of TTFT, on an engine that costs next to nothing.

TTFT here is the way of a request through HTTP, the core, the reservation at decode, the prefill
worker and back. The stages that the prefill worker reports are subtracted. The rest is the
conductor, the sockets, and the one round trip to reserve pages.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running, stage_seconds, timed

MODEL = "fake://bench?layers=2&kv_heads=1&head_dim=8"


def run(console: Console, n_requests: int = 300) -> None:
    """Measure with one request at a time, and with several."""
    table = Table(title=f"Control plane, engine without a model, {n_requests} requests", box=None)
    for column in ("at once", "TTFT p50", "p99", "of it prefill (mean)", "requests/s"):
        table.add_column(column, justify="right")
    with running(MODEL) as url, httpx.Client() as client:
        for _ in range(20):
            timed(client, url, [1, 2, 3], 2)  # warm
        for n_at_once in (1, 8):
            before = stage_seconds(client, url)
            seconds, timings = _drive(url, n_at_once, n_requests)
            after = stage_seconds(client, url)
            stages = ("queue", "fetch", "prefill", "transfer")
            spent_s = sum(after[s][0] - before[s][0] for s in stages) / n_requests
            ttfts = sorted(t.ttft_s for t in timings)
            table.add_row(
                str(n_at_once),
                f"{statistics.median(ttfts) * 1e3:.1f} ms",
                f"{ttfts[int(len(ttfts) * 0.99)] * 1e3:.1f} ms",
                f"{spent_s * 1e3:.1f} ms",
                f"{n_requests / seconds:.0f}",
            )
    console.print(table)


def _drive(url: str, n_at_once: int, n_requests: int) -> tuple[float, list[Timing]]:
    def some(index: int) -> list[Timing]:
        with httpx.Client() as client:
            return [timed(client, url, [index, i, 7], 4) for i in range(n_requests // n_at_once)]

    began = time.perf_counter()
    with ThreadPoolExecutor(n_at_once) as pool:
        timings = [t for part in pool.map(some, range(n_at_once)) for t in part]
    return time.perf_counter() - began, timings
