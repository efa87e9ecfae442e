"""Compare what saved prefixes are worth at a stock vLLM server: `python -m benchmarks.vllm_hit`.

TTFT of a prompt that is nowhere, and of the same prompt again, at one server for each of:

vllm          its own prefix cache, in its own memory
halfmoon      our connector: from a kvstore, after the server's own cache was emptied
example       vLLM's `ExampleConnector`: from safetensors files in a folder, after the same
offloading    vLLM's `OffloadingConnector`: from memory of the host, after the same

All servers are up on the same cores and one works while the others sleep. They take turns, and
medians are printed. A prompt is longer than whole blocks by two tokens: `ExampleConnector` finds
no other prompts. Passes are longer than any prompt: it saves only prompts of one pass.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import READY_WITHIN_S, Timing, timed
from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import ITEM_BYTES, SHAPES
from benchmarks.vllm_cpu import our_vllm_python, vllm_python, vllm_server, wait_ready
from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port

OWN_CACHE = "vllm"
SYSTEMS = (OWN_CACHE, "halfmoon", "example", "offloading")
_MORE_TOKENS = 2
_PASS_TOKENS = 8192
_NEW_TOKENS = 4
_VOCABULARY = range(300, 4000)
#: Ends of tracebacks in a server's log, such as "… [core.py:1] Exception: Offloading is …".
_REASON = re.compile(r"(?:^|\] )([\w.]*(?:Error|Exception|Refused|Unavailable): .+)$", re.MULTILINE)


@dataclass
class HitTimes:
    """Timings of one system: by tokens of the prompt, those of all rounds."""

    misses: dict[int, list[Timing]] = field(default_factory=lambda: defaultdict(list))
    hits: dict[int, list[Timing]] = field(default_factory=lambda: defaultdict(list))


def main(arguments: list[str]) -> None:
    """Measure what the command line chooses, and print a table."""
    options = parser().parse_args(arguments)
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name.strip() for name in options.systems.split(",") if name.strip()]
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise SystemExit(f"--systems: no {', '.join(unknown)}; there are: {', '.join(SYSTEMS)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    mode = "with enforce-eager" if options.enforce_eager else "compiled"
    print(
        f"{options.shape}, {options.dtype}, {options.threads} cores for everything; medians of"
        f" {options.rounds} rounds; vLLM {mode};"
        f" load average at the start {os.getloadavg()[0]:.1f}\n"
    )
    lengths = [int(word) for word in options.prompts.split(",")]
    with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as folder, ExitStack() as stack:
        urls, notes = _start_all(names, options, Path(folder), stack)
        client = stack.enter_context(httpx.Client())
        times = _measure(urls, lengths, options, client)
    print("\n".join([hit_table(lengths, times), *notes]))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.vllm_hit")
    add = made.add_argument
    add("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    add("--prompts", default="1024,4096", help="tokens in whole blocks; two more are sent")
    add("--rounds", type=int, default=5)
    add("--settle", type=float, default=1.0, help="seconds for saving, before a prompt comes again")
    add("--shape", choices=tuple(SHAPES), default="llama-8x512")
    add("--dtype", choices=tuple(ITEM_BYTES), default="float32")
    add("--threads", type=int, default=2, help="cores for everything")
    add("--block-size", type=int, default=64, help="tokens of a block, of all systems")
    add("--enforce-eager", action="store_true", help="vLLM without compilation: starts sooner")
    return made


def hit_table(lengths: Sequence[int], times: Mapping[str, HitTimes]) -> str:
    """Return a row per length and system: medians, and ratios to a hit in vLLM's own cache.

    A ratio is of the own cache's time to this one's: below one, this one takes longer.
    """
    heads = "miss, ms | hit, ms | miss / hit | own cache's hit to it | cached tokens"
    lines = [f"| TTFT | {heads} |", "|---|---|---|---|---|---|"]
    for length in lengths:
        own = times.get(OWN_CACHE, HitTimes()).hits.get(length)
        own_s = statistics.median(each.ttft_s for each in own) if own else None
        for name, each in times.items():
            if not each.hits.get(length):
                continue
            miss_s = statistics.median(one.ttft_s for one in each.misses[length])
            hit_s = statistics.median(one.ttft_s for one in each.hits[length])
            cached = statistics.median_low([one.n_cached for one in each.hits[length]])
            ratio = "–" if own_s is None else f"{own_s / hit_s:.2f}"
            cells = f"{miss_s * 1e3:,.0f} | {hit_s * 1e3:,.1f} | {miss_s / hit_s:.1f} | {ratio}"
            lines.append(f"| {length:,} tokens, {name} | {cells} | {cached:,} |")
    return "\n".join(lines)


def _measure(
    urls: Mapping[str, str], lengths: Sequence[int], options: Any, client: httpx.Client
) -> dict[str, HitTimes]:
    dice = random.Random(1)
    times = {name: HitTimes() for name in urls}
    for name, url in urls.items():  # kernels, and connections
        _miss_and_hit(name, url, dice.choices(_VOCABULARY, k=512), options, client)
    for number in range(options.rounds):
        print(f"round {number + 1}", file=sys.stderr, flush=True)
        for length in lengths:
            # Who goes first changes, so that a machine that slows down does so for all.
            for name in list(urls) if number % 2 == 0 else reversed(list(urls)):
                prompt = dice.choices(_VOCABULARY, k=length + _MORE_TOKENS)
                miss, hit = _miss_and_hit(name, urls[name], prompt, options, client)
                times[name].misses[length].append(miss)
                times[name].hits[length].append(hit)
    return times


def _miss_and_hit(
    name: str, url: str, prompt: list[int], options: Any, client: httpx.Client
) -> tuple[Timing, Timing]:
    miss = timed(client, url, prompt, _NEW_TOKENS)
    time.sleep(options.settle)
    if name != OWN_CACHE:
        client.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    return miss, timed(client, url, prompt, _NEW_TOKENS)


def _start_all(
    names: Sequence[str], options: Any, folder: Path, stack: ExitStack
) -> tuple[dict[str, str], list[str]]:
    """Start servers one after the other; return URLs, and why others are not there."""
    urls: dict[str, str] = {}
    notes: list[str] = []
    for name in names:
        print(f"{name} starts", file=sys.stderr, flush=True)
        logs = folder / name
        logs.mkdir()
        try:
            urls[name] = _start(name, options, logs, stack)
        except (RuntimeError, OSError) as error:
            notes.append(f"{name} did not start: {why_not(logs, error)}")
            print(notes[-1], file=sys.stderr, flush=True)
    return urls, notes


def why_not(logs: Path, error: Exception) -> str:
    """Return the first reason in a server's log, else the error's text."""
    for log in sorted(logs.glob("*.log")):
        if found := _REASON.search(log.read_text(errors="replace")):
            return found.group(1)
    return str(error)


def _start(name: str, options: Any, logs: Path, stack: ExitStack) -> str:
    """Start one server.

    Raises:
        RuntimeError: it ended, or is late.
        OSError: an environment is not there.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    model = model_folder(SHAPES[options.shape])
    flags = ["--dtype", options.dtype, "--block-size", str(options.block_size)]
    flags += ["--kv-cache-memory-bytes", str(2**30), "--max-num-batched-tokens", str(_PASS_TOKENS)]
    flags += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    flags += ["--disable-uvicorn-access-log"]
    if options.enforce_eager:
        flags.append("--enforce-eager")
    python = our_vllm_python() if name == "halfmoon" else vllm_python()
    if connector := _connector(name, model, logs, stack):
        whole = {"kv_role": "kv_both", **connector}
        flags += ["--kv-transfer-config", json.dumps(whole), "--disable-hybrid-kv-cache-manager"]
    server = stack.enter_context(
        vllm_server(
            model,
            port,
            logs,
            threads=options.threads,
            flags=flags,
            variables={"VLLM_SERVER_DEV_MODE": "1"},  # for /reset_prefix_cache
            name=name,
            python=python,
        )
    )
    wait_ready(f"{url}/health", [server], logs)
    return url


def _connector(name: str, model: Path, logs: Path, stack: ExitStack) -> dict[str, Any]:
    """Return fields of `--kv-transfer-config`; none: the server's own cache alone."""
    match name:
        case "halfmoon":
            return {
                "kv_connector": "HalfmoonConnector",
                "kv_connector_module_path": "halfmoon_vllm.connector",
                "kv_connector_extra_config": {"metadata": _start_kvstore(model, logs, stack)},
            }
        case "example":
            return {
                "kv_connector": "ExampleConnector",
                "kv_connector_extra_config": {"shared_storage_path": str(logs)},
            }
        case "offloading":
            return {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 2**30},
            }
    return {}


def _start_kvstore(model: Path, logs: Path, stack: ExitStack) -> str:
    """Start a kvstore, and a conductor for its metadata server; return that server's URL.

    Raises:
        RuntimeError: a process ended, or is late.
    """
    plan = ClusterPlan(model=str(model), http_port=free_port(), n_prefill=0, n_decode=0)
    cluster = stack.enter_context(EmbeddedCluster(plan, logs))
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not cluster.ready():
        if dead := cluster.dead():
            raise RuntimeError("\n".join(dead[0].last_lines()))
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the kvstore is not ready within {READY_WITHIN_S:g} s")
        time.sleep(0.1)
    return plan.metadata_url


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(str, error.cmd))} failed, see above") from None
    except KeyboardInterrupt:
        raise SystemExit("stopped") from None
