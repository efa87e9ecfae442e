"""Measure the cost of metrics per token, beside the metrics library's histogram and counter.

python -m benchmarks.metrics
"""

import random
import statistics
import time
from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from rich.table import Table

from halfmoon_conductor.engine_io.gateway_interface import TokenEvent
from halfmoon_conductor.observability.metrics.generation_timer import GenerationTimer
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_runtime.observability.histogram import FastHistogram

_TIMES = 20_000
_ROUNDS = 7


def _nanoseconds(work: Callable[[float], object]) -> float:
    """Of one call: the median round's mean, less an empty loop's."""
    values = [random.Random(1).lognormvariate(-4, 1) for _ in range(_TIMES)]

    def round_s(each: Callable[[float], object]) -> float:
        began = time.perf_counter()
        for value in values:
            each(value)
        return time.perf_counter() - began

    empty = statistics.median(round_s(float) for _ in range(_ROUNDS))
    return (statistics.median(round_s(work) for _ in range(_ROUNDS)) - empty) / _TIMES * 1e9


def run(console: Console) -> None:
    """Print a table."""
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    meter = GenerationTimer(metrics, time.perf_counter())
    meter.on_first_token(TokenEvent(1), 100)
    bounds = metrics.inter_token_latency_s.bounds
    ours = FastHistogram(bounds)
    theirs = prometheus_client.Histogram("a_seconds", "A.", buckets=bounds, registry=None)
    counter = prometheus_client.Counter("b", "B.", registry=None)
    table = Table(title="What metrics cost", box=None)
    table.add_column("one")
    table.add_column("ns", justify="right")
    rows: list[tuple[str, Callable[[float], object]]] = [
        ("observation, FastHistogram", ours.observe),
        ("observation, the library's Histogram", theirs.observe),
        ("increment, the library's Counter", lambda _: counter.inc()),
        ("token through Meter: all of the front's metrics", lambda _: meter.on_token()),
    ]
    for name, work in rows:
        table.add_row(name, f"{_nanoseconds(work):.0f}")
    began = time.perf_counter()
    page = generate_latest(registry)
    table.add_row(
        f"scrape of the front's metrics, {len(page):,} bytes",
        f"{(time.perf_counter() - began) * 1e9:,.0f}",
    )
    console.print(table)


if __name__ == "__main__":
    run(Console())
