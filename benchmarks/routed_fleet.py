"""Compare routers of two stock vLLM servers by TTFT: `python -m benchmarks.routed_fleet`.

halfmoon-route     `halfmoon route`, which follows the servers' KV events
vllm-cache-aware   vllm-router with its policy cache_aware
vllm-round-robin   vllm-router in turns

All routers stand before the same two servers, on the same cores. They take turns: before each
turn the servers' caches are emptied. All get the same arrivals, of prompts with the same lengths
and the same sharing but other tokens. The load is the prefix-heavy slice of the conversation
trace (`benchmarks.goodput`).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import ITEM_BYTES, SHAPES
from benchmarks.goodput.load_run import send_load
from benchmarks.goodput.loads import arriving, heavy_slice
from benchmarks.goodput.systems import SystemChoices, install, start_router, start_server
from benchmarks.vllm_cpu import wait_ready
from halfmoon_cli.bench.bench_record import Slo
from halfmoon_cli.bench.load_plan import PlannedRequest, plan_stats
from halfmoon_cli.bench.run_summary import BenchSummary
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_simulator.workloads.workload_sources import WorkloadSpec, find_traces, make_workload

OURS = "halfmoon-route"
POLICIES = {"vllm-cache-aware": "cache_aware", "vllm-round-robin": "round_robin"}
ROUTERS = (OURS, *POLICIES)
#: The longest prompt is of 2,048 tokens.
_MAX_TOKENS = 4096
_FEWEST = 12
_DESCRIBED = 240
#: Seconds of rest before a load, for events of emptied caches.
_REST_S = 2.0
_NO_LIMITS = Slo(None, None, "tail")

Runs = Mapping[str, Mapping[float, Sequence[BenchSummary]]]


def main(arguments: list[str]) -> None:
    """Measure what the command line chooses, and print a table."""
    options = parser().parse_args(arguments)
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name.strip() for name in options.routers.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ROUTERS]:
        raise SystemExit(f"--routers: no {', '.join(unknown)}; there are: {', '.join(ROUTERS)}")
    install([name for name in names if name in POLICIES] + ["vllm"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    trace = make_workload(WorkloadSpec(source=options.trace, folder=find_traces())).requests
    stats = plan_stats([(request,) for request in heavy_slice(trace, _DESCRIBED)])
    mode = "with enforce-eager" if options.enforce_eager else "compiled"
    print(
        f"{stats.n_requests:,} requests: prompts of {stats.mean_input_tokens:.0f} tokens in the"
        f" mean, {stats.shared:.0%} of them in blocks seen before, answers of"
        f" {stats.mean_output_tokens:.0f}; as {options.prompts}\n"
        f"{options.shape}, {options.dtype}, two servers on {options.threads} cores with everything"
        f" else, KV of {options.kv_mib} MiB each; {options.seconds:g} s a rate, medians of"
        f" {options.rounds} rounds; vLLM {mode}; load average at the start {os.getloadavg()[0]:.1f}"
    )
    runs: dict[str, dict[float, list[BenchSummary]]] = {name: defaultdict(list) for name in names}
    try:
        with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as folder, ExitStack() as stack:
            servers, urls = _start_fleet(names, options, Path(folder), stack)
            _run_all(
                urls,
                servers,
                lambda rate: heavy_slice(trace, max(_FEWEST, round(rate * options.seconds))),
                options,
                runs,
            )
    except KeyboardInterrupt:
        print("stopped; what was measured until then:")
    print(f"\n{fleet_table(options.rates, runs, OURS)}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.routed_fleet")
    add = made.add_argument
    add("--routers", default=f"{OURS},vllm-cache-aware", help=f"of {', '.join(ROUTERS)}")
    add("--rates", type=_numbers, default=(2.0, 4.0), help="requests per second")
    add("--seconds", type=float, default=30.0, help="of arrivals at each rate")
    add("--rounds", type=int, default=3)
    add("--shape", choices=tuple(SHAPES), default="llama-8x512")
    add("--dtype", choices=tuple(ITEM_BYTES), default="float32")
    add("--threads", type=int, default=2, help="cores for everything; servers get half each")
    add("--kv-mib", type=int, default=256, help="memory of each server's KV cache")
    add("--block-size", type=int, default=64, help="tokens of a block of the servers")
    add("--prompts", choices=("ids", "text"), default="ids")
    add(
        "--option",
        action="append",
        default=[],
        help="of halfmoon route: conductor.placement=min_ttft",
    )
    add("--timeout", type=float, default=60.0, help="seconds until a request has failed")
    add("--trace", default="conversation", help="file of a trace, or a stand-in's name")
    add("--seed", type=int, default=0, help="of arrivals")
    add("--enforce-eager", action="store_true", help="vLLM without compilation: starts sooner")
    return made


def fleet_table(rates: Sequence[float], runs: Runs, ours: str) -> str:
    """Return a row per rate and router: medians over rounds of each round's figures.

    The ratio is of our router's mean TTFT to this one's: below one, ours is sooner.
    """
    heads = f"mean TTFT, ms | {ours}'s to it | TTFT p50 / p99, ms | cached | finished"
    lines = [f"| | {heads} |", "|---|---|---|---|---|---|"]
    for rate in rates:
        own = runs.get(ours, {}).get(rate)
        own_s = statistics.median(each.ttft_s.mean for each in own) if own else None
        for name, by_rate in runs.items():
            if not (found := by_rate.get(rate)):
                continue
            mean_s = statistics.median(each.ttft_s.mean for each in found)
            p50_s = statistics.median(each.ttft_s.p50 for each in found)
            p99_s = statistics.median(each.ttft_s.p99 for each in found)
            ratio = "–" if own_s is None or not mean_s else f"{own_s / mean_s:.2f}"
            finished = sum(each.n_finished for each in found)
            total = sum(each.n_requests for each in found)
            cells = f"{mean_s * 1e3:.0f} | {ratio} | {p50_s * 1e3:.0f} / {p99_s * 1e3:.0f}"
            cells += f" | {_cached(found)} | {finished} of {total}"
            lines.append(f"| {rate:g}/s, {name} | {cells} |")
    return "\n".join(lines)


def _cached(found: Sequence[BenchSummary]) -> str:
    shares = [
        each.n_cached_tokens / each.n_prompt_tokens
        for each in found
        if each.n_cached_tokens is not None and each.n_prompt_tokens
    ]
    return f"{statistics.median(shares):.2f}" if shares else "–"


def _run_all(
    urls: Mapping[str, str],
    servers: Sequence[str],
    requests: Any,
    options: Any,
    runs: dict[str, dict[float, list[BenchSummary]]],
) -> None:
    names = list(urls)
    for name in names:
        _turn(name, urls[name], servers, requests(1.0), 1.0, options)
    for number in range(options.rounds):
        for rate in options.rates:
            # Who goes first changes, so that a machine that slows down does so for all.
            for name in names if number % 2 == 0 else reversed(names):
                summary = _turn(
                    name, urls[name], servers, requests(rate), rate, options, seed=number
                )
                runs[name][rate].append(summary)
                _say(
                    f"round {number + 1}, {rate:g}/s, {name}: mean TTFT"
                    f" {summary.ttft_s.mean * 1e3:.0f} ms, {summary.n_finished} of"
                    f" {summary.n_requests} finished {summary.failures or ''}"
                )


_turns = 0


def _turn(
    name: str,
    url: str,
    servers: Sequence[str],
    requests: list[PlannedRequest],
    rate: float,
    options: Any,
    seed: int = 0,
) -> BenchSummary:
    """Empty the servers' caches, and send a load through one router."""
    global _turns
    _turns += 1
    for server in servers:
        httpx.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()
    time.sleep(_REST_S)
    chains = arriving(requests, rate_per_s=rate, seconds=options.seconds, seed=options.seed + seed)
    return send_load(
        url,
        chains,
        _NO_LIMITS,
        salt=f"{_turns}",
        as_text=options.prompts == "text",
        limit_s=options.timeout,
    )


def _start_fleet(
    names: Sequence[str], options: Any, folder: Path, stack: ExitStack
) -> tuple[list[str], dict[str, str]]:
    """Start both servers, then all routers; return URLs of servers, and of routers by name.

    Raises:
        RuntimeError: a process ended, or is late.
    """
    choices = SystemChoices(
        model=model_folder(SHAPES[options.shape]),
        dtype=options.dtype,
        threads=options.threads,
        eager=options.enforce_eager,
    )
    urls: list[str] = []
    processes: list[subprocess.Popen[bytes]] = []
    events: list[str] = []
    for i in range(2):
        _say(f"server {i + 1} of 2 starts")
        named = [(name, free_port()) for name in ("events", "replay")]
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # vLLM publishes at "*", and connects to the address of one interface instead.
            "endpoint": f"tcp://*:{named[0][1]}",
            "replay_endpoint": f"tcp://*:{named[1][1]}",
        }
        url, server = start_server(
            choices,
            folder,
            stack,
            f"vllm-{i}",
            max(1, options.threads // 2),
            # The last of two equal flags counts.
            flags=[
                *("--kv-events-config", json.dumps(config)),
                *("--kv-cache-memory-bytes", str(options.kv_mib << 20)),
                *("--block-size", str(options.block_size)),
                *("--max-model-len", str(_MAX_TOKENS)),
            ],
            variables={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
        )
        urls.append(url)
        processes.append(server)
        events.append(",".join(f"{name}=tcp://127.0.0.1:{port}" for name, port in named))
    for url in urls:
        wait_ready(f"{url}/health", processes, folder)
    routers: dict[str, str] = {}
    for name in names:
        _say(f"{name} starts")
        if name == OURS:
            targets = [f"{url},{where}" for url, where in zip(urls, events, strict=True)]
            routers[name] = _start_route(targets, options.option, processes, folder, stack)
        else:
            policy = ["--policy", POLICIES[name], "--worker-urls", *urls]
            routers[name] = start_router(policy, processes, folder, stack).url
    return urls, routers


def _start_route(
    targets: Sequence[str],
    options: Sequence[str],
    servers: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    stack: ExitStack,
) -> str:
    port = free_port()
    command = [sys.executable, "-m", "halfmoon_cli", "route", "--port", str(port)]
    command += ["--state", str(folder / "route")]
    command += [word for target in targets for word in ("--worker", target)]
    command += [word for option in options for word in ("-o", option)]
    with (folder / "route.log").open("wb") as log:
        route = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    stack.callback(_stop, route)
    url = f"http://127.0.0.1:{port}"
    wait_ready(f"{url}/ready", [route, *servers], folder)
    return url


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd))} failed, see above") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
