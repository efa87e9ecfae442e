"""Compare whole servers by the load that they serve within limits: `python -m benchmarks.goodput`.

The most requests per second of which 90 % are good, for each system, on two loads. All systems
run on the same cores, as does the one client. Limits are 10 times the shortest TTFT and 5 times
the shortest time between tokens of any system without load, which is measured first. vLLM and its
router are installed into environments of their own under ~/.cache/halfmoon.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import SHAPES
from benchmarks.goodput.load_run import send_load
from benchmarks.goodput.loads import arriving, heavy_slice, one_by_one, without_sharing
from benchmarks.goodput.process_times import processor_s
from benchmarks.goodput.rate_search import RateSearch
from benchmarks.goodput.report import (
    RateResult,
    SearchResult,
    UnloadedResult,
    rates_table,
    search_table,
    unloaded_table,
)
from benchmarks.goodput.systems import SYSTEMS, RunningSystem, SystemChoices, install
from halfmoon_cli.bench.bench_record import Slo
from halfmoon_cli.bench.load_plan import PlannedRequest, RequestChain, plan_stats
from halfmoon_simulator.workloads.traces import TraceRequest
from halfmoon_simulator.workloads.workload_sources import (
    WorkloadSpec,
    find_traces,
    make_workload,
)

LOADS = ("heavy", "flat")
#: Options of a comparison in minutes: a coarser search, and fewer systems without load.
SHORT: dict[str, Any] = {
    "seconds": 8.0,
    "precision": 1.5,
    "timeout": 20.0,
    "loads": "heavy",
    "unloaded": 2,
}
DEFAULT_SYSTEMS = "halfmoon,vllm,vllm-cache-aware,vllm-round-robin,vllm-pd"
#: Limits as multiples of the best unloaded times.
TTFT_TIMES, TBT_TIMES = 10.0, 5.0
_UNLOADED_REQUESTS = 24
#: Requests of a load at the least, before they come again.
_FEWEST = 12
_IDLE_S = 5.0
#: Requests whose lengths and sharing are printed.
_DESCRIBED = 240
#: Seconds of rest between two loads, and after a start.
_REST_S = 2.0
_FAILURES = (RuntimeError, OSError, subprocess.CalledProcessError)


class GoodputRun:
    """What the command line chose, and what was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.trace = _trace(options.trace)
        self.slo = Slo(options.ttft_limit, options.tbt_limit, options.tbt_by)
        self.unloaded: dict[str, UnloadedResult] = {}
        self.found: dict[str, dict[str, list[SearchResult]]] = {
            load: defaultdict(list) for load in LOADS
        }
        self.notes: list[str] = []
        self._n_salts = 0

    def requests(self, load: str, n: int) -> list[PlannedRequest]:
        """Return about so many requests of a load."""
        heavy = heavy_slice(self.trace, n)
        return heavy if load == "heavy" else without_sharing(heavy)

    def choices(self) -> SystemChoices:
        """Return what all systems have in common, with the limits as far as they are known."""
        options = self.options
        return SystemChoices(
            model=model_folder(SHAPES[options.shape]),
            dtype=options.dtype,
            threads=options.threads,
            eager=options.enforce_eager,
            ttft_limit_s=self.slo.ttft_s,
            tbt_limit_s=self.slo.tbt_s,
            vllm_flags=tuple(options.vllm_flag),
            vllm_variables=tuple(tuple(each.split("=", 1)) for each in options.vllm_env),
            halfmoon_flags=tuple(
                (role, flag)
                for role, _, flag in (each.partition(":") for each in options.halfmoon_flag)
            ),
        )

    def measure_unloaded(self, name: str) -> None:
        """Measure a system with one request at a time, and without any."""
        _say(f"{name} starts, for its times without load")
        try:
            with SYSTEMS[name](self.choices()) as system:
                self._warm_up(system)
                idle = _idle_share(system)
                chains = one_by_one(self.requests("flat", _UNLOADED_REQUESTS))
                summary = self._send(system, chains)
        except _FAILURES as error:
            self._note(name, error)
            return
        if summary.n_finished < summary.n_requests:
            self._note(name, RuntimeError(f"without load: {summary.failures or summary.refusals}"))
            return
        tbt_s = {"mean": summary.tbt_s, "tail": summary.tbt_tail_s, "max": summary.gap_s}
        self.unloaded[name] = UnloadedResult(
            summary.ttft_s.p50, tbt_s[self.options.tbt_by].p50, idle
        )

    def set_limits(self) -> None:
        """Derive the limits that the command line does not give.

        Raises:
            SystemExit: no system could be measured.
        """
        if not self.unloaded:
            if self.slo.ttft_s is None or self.slo.tbt_s is None:
                raise SystemExit("\n".join(["no system ran without load", *self.notes]))
            return
        best_ttft_s = min(each.ttft_s for each in self.unloaded.values())
        best_tbt_s = min(each.tbt_s for each in self.unloaded.values())
        self.slo = Slo(
            self.slo.ttft_s or TTFT_TIMES * best_ttft_s,
            self.slo.tbt_s or TBT_TIMES * best_tbt_s,
            self.options.tbt_by,
        )

    def search(self, name: str, loads: Sequence[str]) -> None:
        """Search a system's highest good rate of each load."""
        _say(f"{name} starts")
        try:
            with SYSTEMS[name](self.choices()) as system:
                self._warm_up(system)
                for load in loads:
                    self.found[load][name].append(self._search_one(name, system, load))
        except _FAILURES as error:
            self._note(name, error)

    def _search_one(self, name: str, system: RunningSystem, load: str) -> SearchResult:
        options = self.options
        search = RateSearch(options.first_rate, precision=options.precision)
        results: list[RateResult] = []
        for rate in options.rates or search.rates():
            requests = self.requests(load, max(_FEWEST, round(rate * options.seconds)))
            chains = arriving(requests, rate_per_s=rate, seconds=options.seconds, seed=options.seed)
            before_s, began_s = processor_s(system.pids), time.monotonic()
            summary = self._send(system, chains)
            busy = (processor_s(system.pids) - before_s) / (time.monotonic() - began_s)
            search.record(rate, summary.good_share)
            results.append(RateResult(rate, summary, busy))
            _say(
                f"{name}, {load}, {rate:.2f}/s: {summary.good_share:.2f} good of"
                f" {summary.n_requests}, TTFT p99 {summary.ttft_s.p99 * 1e3:.0f} ms"
            )
            time.sleep(_REST_S)
        return SearchResult(search.best, tuple(results))

    def _warm_up(self, system: RunningSystem) -> None:
        requests = self.requests("flat", _FEWEST)
        chains = arriving(requests, rate_per_s=4.0, seconds=3.0, seed=1)
        self._send(system, chains)
        time.sleep(_REST_S)

    def _send(self, system: RunningSystem, chains: list[RequestChain]) -> Any:
        self._n_salts += 1
        return send_load(
            system.url,
            chains,
            self.slo,
            salt=str(self._n_salts),
            as_text=self.options.prompts == "text",
            limit_s=self.options.timeout,
        )

    def _note(self, name: str, error: Exception) -> None:
        self.notes.append(f"{name}: {error}")
        _say(self.notes[-1])

    def text(self, loads: Sequence[str]) -> str:
        """Return all tables."""
        assert self.slo.ttft_s is not None
        assert self.slo.tbt_s is not None
        parts = [
            f"good: first token within {self.slo.ttft_s * 1e3:.0f} ms,"
            f" {self.slo.tbt_s * 1e3:.1f} ms between tokens ({self.slo.tbt_by} of a request)"
        ]
        if self.unloaded:
            parts += ["", unloaded_table(self.unloaded)]
        for load in loads:
            if self.found[load]:
                parts += ["", search_table(load, self.found[load])]
        for load in loads:
            if self.found[load]:
                parts += ["", rates_table(load, self.found[load])]
        return "\n".join([*parts, *self.notes])


def main(arguments: list[str]) -> None:
    """Measure what the command line chooses, and print tables."""
    options = read_options(arguments)
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = _chosen(options.systems, SYSTEMS, "--systems")
    loads = _chosen(options.loads, LOADS, "--loads")
    _say("environments of vLLM and its router are made if they are not there")
    install(names)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    run = GoodputRun(options)
    for load in loads:
        stats = plan_stats([(request,) for request in run.requests(load, _DESCRIBED)])
        print(
            f"{load}, of {stats.n_requests:,} requests: prompts of"
            f" {stats.mean_input_tokens:.0f} tokens in the mean, {stats.shared:.0%} of them in"
            f" blocks seen before, answers of {stats.mean_output_tokens:.0f}"
        )
    print(
        f"{options.shape}, {options.dtype}, {options.threads} cores for everything;"
        f" {options.seconds:g} s a rate, {options.rounds} rounds, prompts as {options.prompts};"
        f" a search ends at {options.precision:g} between a bad rate and a good one;"
        f" a request fails after {options.timeout:g} s; limits are of"
        f" {'all systems' if not options.unloaded else f'the first {options.unloaded} systems'};"
        f" vLLM {'with enforce-eager' if options.enforce_eager else 'compiled'};"
        f" load average at the start {os.getloadavg()[0]:.1f}"
    )
    try:
        if options.ttft_limit is None or options.tbt_limit is None:
            unlimited = [name for name in names if name != "halfmoon-limits"]
            for name in unlimited[: options.unloaded or None]:
                run.measure_unloaded(name)
        run.set_limits()
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                run.search(name, loads)
    except KeyboardInterrupt:
        print("stopped; what was measured until then:\n")
    with suppress(AssertionError):
        print(run.text(loads))
    if options.json:
        record = {"slo": run.slo, "unloaded": run.unloaded, "found": run.found}
        Path(options.json).write_bytes(msgspec.json.format(msgspec.json.encode(record)))


def read_options(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; with --short, what it does not say is `SHORT`."""
    made = parser()
    if made.parse_args(arguments).short:
        made.set_defaults(**SHORT)
    return made.parse_args(arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.goodput")
    add = made.add_argument
    add("--systems", default=DEFAULT_SYSTEMS, help=f"of {', '.join(SYSTEMS)}")
    add("--loads", default=",".join(LOADS), help=f"of {', '.join(LOADS)}")
    add("--seconds", type=float, default=30.0, help="of arrivals at each rate")
    add("--rounds", type=int, default=1, help="searches of each system; medians are shown")
    add("--first-rate", type=float, default=4.0, help="requests per second to begin with")
    add("--rates", type=_numbers, default=(), help="measure these rates instead of searching")
    add("--precision", type=float, default=1.15, help="lowest bad rate over highest good one")
    add("--ttft-limit", type=float, help="seconds; else 10 times the best without load")
    add("--tbt-limit", type=float, help="seconds; else 5 times the best without load")
    add("--tbt-by", choices=("mean", "tail", "max"), default="tail", help="of a request's gaps")
    add(
        "--unloaded",
        type=int,
        default=0,
        help="measure so many systems, the first ones, without load; 0: all",
    )
    add(
        "--short",
        action="store_true",
        help="minutes rather than half an hour: "
        + ", ".join(f"--{name} {value}" for name, value in SHORT.items()),
    )
    add("--timeout", type=float, default=60.0, help="seconds until a request has failed")
    add("--shape", choices=tuple(SHAPES), default="llama-3.4m")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--threads", type=int, default=2, help="cores for all systems and the client")
    add("--prompts", choices=("ids", "text"), default="ids")
    add("--trace", default="", help="file of the conversation trace, or a stand-in's name")
    add("--seed", type=int, default=0, help="of arrivals")
    add("--enforce-eager", action="store_true", help="vLLM without compilation: starts sooner")
    add("--vllm-flag", action="append", default=[], help="a further flag of `vllm serve`")
    add("--vllm-env", action="append", default=[], help="NAME=VALUE in vLLM's environment")
    add("--halfmoon-flag", action="append", default=[], help="such as prefill:--chunk-tokens=256")
    add("--json", help="file for all results")
    return made


def _trace(given: str) -> list[TraceRequest]:
    source = given or "conversation"
    made = make_workload(WorkloadSpec(source=source, folder=find_traces()))
    print(f"lengths and sharing of {made.description}")
    if not heavy_slice(made.requests, _FEWEST):
        raise SystemExit(f"{source} has no requests whose prompts begin alike")
    return made.requests


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _idle_share(system: RunningSystem) -> float:
    before_s = processor_s(system.pids)
    time.sleep(_IDLE_S)
    return (processor_s(system.pids) - before_s) / _IDLE_S


def _chosen(text: str, known: Any, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in words if word not in known]:
        raise SystemExit(f"{flag}: no {', '.join(unknown)}; there are: {', '.join(known)}")
    return words


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd))} failed, see above") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
