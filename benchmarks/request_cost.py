"""Measure what a trivial request costs: processor time of each service, and requests per second.

One prefill, one decode and one kvstore behind a conductor, with the engine that computes next to
nothing and with the demo model in torch. The same client asks a bare uvicorn, for scale. Processor
time is the figure to compare: wall-clock time depends on what else the machine does. Instructions
repeat best; they are counted where `perf` can count them. After the
loads the same cluster idles, and its processes are told to exit one after another.
"""

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import running_cluster
from benchmarks.conductor.load import Figures, Plan
from benchmarks.instruction_count import InstructionCount
from benchmarks.processor_time import processor_seconds
from halfmoon_cli.common.demo_model import demo_model_folder
from halfmoon_cli.up.embedded_cluster import EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port

FAKE_MODEL = "fake://bench?layers=2&kv_heads=1&head_dim=8"
SERVICES = ("conductor", "prefill", "decode", "kvstore")
#: Clients at once, tokens of each answer, and whether answers are streamed.
LOADS = tuple(
    (n_clients, n_new, stream)
    for stream in (True, False)
    for n_clients, n_new in ((1, 1), (1, 16), (32, 1), (32, 16))
)
_PROMPT = msgspec.Raw(b'"Hello"')
_READY_WITHIN_S = 20.0
_EXIT_WITHIN_S = 60.0


class RequestCost(NamedTuple):
    """One measurement."""

    figures: Figures
    #: Processor milliseconds per request, by service.
    processor_ms: dict[str, float]
    #: Millions of user-mode instructions per request, by service; empty: not counted.
    instructions: dict[str, float]


def run(console: Console, seconds: float = 5.0, idle_s: float = 20.0) -> None:
    """Measure both engines under each load, then idle."""
    loads = ("engine", "answer", "clients", "tokens")
    table = _table("A trivial request: processor ms", *loads, "requests/s", "TTFT p50", *SERVICES)
    counts = _table("A trivial request: millions of instructions", *loads, *SERVICES)
    with echo_server() as (port, pid):
        for n_clients in (1, 32):
            cost = measure(port, {"echo": [pid]}, n_clients, 1, seconds)
            _add_rows(table, counts, ("bare uvicorn", "stream", str(n_clients), "1"), cost)
    idle: dict[str, dict[str, float]] = {}
    exits: dict[str, dict[str, float]] = {}
    for name, model in (("fake", FAKE_MODEL), ("torch", str(demo_model_folder()))):
        with running_cluster(model) as cluster:
            services = service_pids(cluster)
            measure(cluster.plan.http_port, services, 8, 4, 1.0)  # warm
            for n_clients, n_new, stream in LOADS:
                cost = measure(
                    cluster.plan.http_port, services, n_clients, n_new, seconds, stream=stream
                )
                load = name, "stream" if stream else "whole", str(n_clients), str(n_new)
                _add_rows(table, counts, load, cost)
            idle[name] = _idle_shares(services, idle_s)
            idle[name]["all"] = sum(idle[name].values())
            exits[name] = _exit_seconds(cluster)
    console.print(table)
    console.print(counts)
    columns = (*SERVICES, "all")
    _print_services(console, f"Idle: share of one core over {idle_s:.0f} s", columns, idle, ".2%")
    _print_services(console, "Seconds from SIGTERM to exit, idle", SERVICES, exits, ".2f")


def service_pids(cluster: EmbeddedCluster) -> dict[str, list[int]]:
    """Return the process ids of a cluster by service."""
    pids: dict[str, list[int]] = {service: [] for service in SERVICES}
    for process in cluster.processes.values():
        pids[process.spec.role].append(process.pid)
    return pids


def measure(
    port: int,
    services: Mapping[str, Iterable[int]],
    n_clients: int,
    n_new: int,
    seconds: float,
    *,
    stream: bool = True,
) -> RequestCost:
    """Ask again and again with so many clients, and divide the processor time by the requests.

    Args:
        port: of the REST API.
        services: process ids by service.
        n_clients: connections, each with one request at a time.
        n_new: tokens of each answer.
        seconds: how long to ask.
        stream: whether answers are streamed.
    """
    plan = Plan(
        port=port,
        kind="closed",
        load=n_clients,
        seconds=seconds,
        warm_s=0.0,
        n_new=n_new,
        seed=1,
        prompts=[_PROMPT],
        pids=[],
        min_events=0,
        stream=stream,
    )
    counting = InstructionCount(services)
    before = processor_seconds(services)
    client = subprocess.run(
        [sys.executable, "-m", "benchmarks.conductor.load"],
        input=msgspec.json.encode(plan),
        stdout=subprocess.PIPE,
        check=True,
    )
    after = processor_seconds(services)
    counted = counting.stop()
    figures = msgspec.json.decode(client.stdout, type=Figures)
    if figures.n_failed or not figures.n_requests:
        raise RuntimeError(f"{figures.n_failed} of {figures.n_requests} requests failed")
    spent_ms = {
        service: (after[service] - before[service]) * 1e3 / figures.n_requests
        for service in services
    }
    counts = {service: n / 1e6 / figures.n_requests for service, n in counted.items()}
    return RequestCost(figures, spent_ms, counts)


@contextmanager
def echo_server() -> Iterator[tuple[int, int]]:
    """Run a bare uvicorn for the length of a block; its port and process id."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.echo_server", str(port)])
    try:
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}")
                break
            except httpx.HTTPError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def _idle_shares(services: Mapping[str, Iterable[int]], seconds: float) -> dict[str, float]:
    """Return the share of one core that each service takes while nothing is asked."""
    before = processor_seconds(services)
    time.sleep(seconds)
    after = processor_seconds(services)
    return {service: (after[service] - before[service]) / seconds for service in services}


def _exit_seconds(cluster: EmbeddedCluster) -> dict[str, float]:
    """Return the seconds that each service takes to exit; the conductor, asked last, serves all."""
    seconds: dict[str, float] = {}
    for process in reversed(cluster.processes.values()):
        began_s = time.perf_counter()
        process.signal(signal.SIGTERM)
        if not process.wait(_EXIT_WITHIN_S):
            raise RuntimeError(f"{process.spec.name} has not ended within {_EXIT_WITHIN_S} s")
        seconds[process.spec.role] = time.perf_counter() - began_s
    return seconds


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None)
    for column in (*columns, "all"):
        table.add_column(column, justify="right")
    return table


def _add_rows(times: Table, counts: Table, load: tuple[str, ...], cost: RequestCost) -> None:
    figures = cost.figures
    rate = f"{figures.n_requests / figures.seconds:.0f}"
    ttft = f"{statistics.median(figures.ttft_s) * 1e3:.1f} ms"
    times.add_row(*load, rate, ttft, *_by_service(cost.processor_ms))
    if cost.instructions:
        counts.add_row(*load, *_by_service(cost.instructions))


def _by_service(figures: Mapping[str, float]) -> list[str]:
    shown = [f"{figures[service]:.2f}" if service in figures else "–" for service in SERVICES]
    return [*shown, f"{sum(figures.values()):.2f}"]


def _print_services(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Mapping[str, float]],
    number: str,
) -> None:
    table = Table(title=title, box=None)
    for column in ("engine", *columns):
        table.add_column(column, justify="right")
    for name, figures in rows.items():
        table.add_row(name, *(format(figures[column], number) for column in columns))
    console.print(table)
