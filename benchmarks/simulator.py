"""Measure the simulator's speed, and its error against a live cluster."""

import random
import threading
import time
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running, timed
from benchmarks.model import VOCABULARY, random_model
from halfmoon_cli.simulate.machine_profile import cost_file, measure_engine, measure_transfers
from halfmoon_simulator.cluster.cluster_sim import ClusterSim
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.costs.cost_file import CostFile, load_costs
from halfmoon_simulator.results.run_results import DistributionSummary, summarize_values
from halfmoon_simulator.scenario import Scenario, scheduling_for_simulation
from halfmoon_simulator.scenario import run_scenario as simulate
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec, find_traces, make_workload

#: The comparison's workload: Poisson, prompts of these lengths, some with a shared start.
N_REQUESTS = 40
RATE_PER_S = 0.7
PROMPT_TOKENS = (130, 260, 390, 650, 1040)
N_NEW = 32
BLOCK_TOKENS = 64
SHARED_BLOCKS = 4
POOL_MIB = 1024


def run_speed(console: Console) -> None:
    """The conversation trace, or its stand-in, on 8P+8D: seconds of one core."""
    workload = WorkloadSpec(source="conversation", folder=find_traces())
    costs = load_costs("llama3-70b-a800x8")
    scenario = Scenario(
        label="speed",
        workload=workload,
        costs=costs,
        cluster=ClusterSpec(n_prefill=8, n_decode=8),
        scheduling=scheduling_for_simulation(costs, ttft_slo_s=30.0, tbt_slo_s=0.1),
    )
    cpu, began = time.process_time(), time.perf_counter()
    result = simulate(scenario)
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    simulated_s = result.summary().duration_s
    console.print(
        f"simulator: {make_workload(workload).description}, {len(result.records):,} requests on"
        f" 8P+8D: {cpu_s:.1f} s of one core ({wall_s:.1f} s on the wall), {result.n_events:,}"
        f" events, {simulated_s / cpu_s:,.0f} times as fast as the clock",
        highlight=False,
    )


class _Ask(NamedTuple):
    at_s: float
    prompt: list[int]
    blocks: tuple[int, ...]


def run_comparison(console: Console, seed: int = 1) -> None:
    """Profile this machine, run 1P+1D live, and simulate the same requests."""
    with random_model() as model:
        _compare(model, console, seed)


def _compare(model: str, console: Console, seed: int) -> None:
    console.print("profiling, one thread per worker …")
    points = measure_engine(model, block_size=BLOCK_TOKENS, threads=1)
    costs = cost_file(points, measure_transfers(), 1, POOL_MIB << 20, POOL_MIB << 20)
    asks = _asks(seed)
    console.print(f"running {N_REQUESTS} requests live …")
    live = _live(model, asks)
    simulated = _simulated(costs, asks)
    table = Table(title=f"1P+1D, seed {seed}", title_justify="left", box=None)
    for column in ("", "mean", "p50", "p90", "max"):
        table.add_column(column, justify="right")
    for name, measured, predicted in zip(
        ("TTFT", "TBT"), _spreads(live), _spreads(simulated), strict=True
    ):
        table.add_row(f"{name} live", *_cells(measured))
        table.add_row(f"{name} simulated", *_cells(predicted))
        table.add_row("", f"{predicted.mean / measured.mean - 1:+.0%}")
    console.print(table)
    cached = [sum(timing.n_cached for timing in timings) for timings in (live, simulated)]
    console.print(f"cached tokens: {cached[0]} live, {cached[1]} simulated", highlight=False)


def _asks(seed: int) -> list[_Ask]:
    dice = random.Random(seed)
    shared = dice.choices(VOCABULARY, k=SHARED_BLOCKS * BLOCK_TOKENS)
    at_s, asks, next_block = 0.0, [], SHARED_BLOCKS
    for _ in range(N_REQUESTS):
        at_s += dice.expovariate(RATE_PER_S)
        n = dice.choice(PROMPT_TOKENS)
        start = shared if n > len(shared) and dice.random() < 0.5 else []
        prompt = [*start, *dice.choices(VOCABULARY, k=n - len(start))]
        n_own = -(-n // BLOCK_TOKENS) - len(start) // BLOCK_TOKENS
        own = range(next_block, next_block + n_own)
        next_block += n_own
        asks.append(_Ask(at_s, prompt, (*range(len(start) // BLOCK_TOKENS), *own)))
    return asks


def _live(model: str, asks: list[_Ask]) -> list[Timing]:
    one_thread = ["--threads", "1"]
    timings: dict[int, Timing] = {}
    with (
        running(model, extra={"prefill": one_thread, "decode": one_thread}) as url,
        httpx.Client(limits=httpx.Limits(max_connections=None)) as client,
    ):
        timed(client, url, random.Random(0).choices(VOCABULARY, k=64), 4)  # warm
        began = time.perf_counter()

        def ask(index: int) -> None:
            time.sleep(max(0.0, began + asks[index].at_s - time.perf_counter()))
            timings[index] = timed(client, url, asks[index].prompt, N_NEW)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [timings[i] for i in range(len(asks))]


def _simulated(costs: CostFile, asks: list[_Ask]) -> list[Timing]:
    requests = [TraceRequest(ask.at_s, len(ask.prompt), N_NEW, ask.blocks) for ask in asks]
    spec = ClusterSpec(
        n_prefill=1,
        n_decode=1,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=512,
        max_running=64,
        max_new_tokens=N_NEW,
        report_s=0.1,
        tick_s=0.05,
    )
    records = ClusterSim(spec, costs, scheduling_for_simulation(costs), requests).run().records
    return [
        Timing(record.ttft_s or 0.0, record.intervals.mean_s, record.n_cached)
        for record in sorted(records, key=lambda record: record.index)
    ]


def _spreads(timings: list[Timing]) -> tuple[DistributionSummary, DistributionSummary]:
    assert timings, "nobody answered"
    return summarize_values([t.ttft_s for t in timings]), summarize_values(
        [t.tbt_s for t in timings]
    )


def _cells(values: DistributionSummary) -> list[str]:
    found = (values.mean, values.p50, values.p90, values.max)
    return [f"{value * 1e3:.1f} ms" for value in found]
