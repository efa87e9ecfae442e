"""Start a cluster and time requests to it."""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port

READY_WITHIN_S = 300.0
_ANY_CORE: Mapping[str, int] = MappingProxyType({})


class Timing(NamedTuple):
    """One streamed request, in seconds."""

    ttft_s: float
    #: From the first token to the last, per token after the first.
    tbt_s: float
    n_cached: int
    token_ids: tuple[int, ...] = ()


@contextmanager
def running(model: str, **plan: Any) -> Iterator[str]:
    """Run a cluster for the length of a block; its URL."""
    with running_cluster(model, **plan) as cluster:
        yield cluster.plan.url


@contextmanager
def running_cluster(
    model: str, *, cores: Mapping[str, int] = _ANY_CORE, **plan: Any
) -> Iterator[EmbeddedCluster]:
    """Run a cluster for the length of a block, once it is ready.

    Args:
        model: its folder.
        cores: processes by name that run on one core each; others run on any.
        plan: further fields of `ClusterPlan`.

    Raises:
        RuntimeError: a process ended, or not all were ready in time.
    """
    whole = ClusterPlan(model=model, http_port=free_port(), served_model_name="bench", **plan)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(whole, Path(folder)) as cluster,
        httpx.Client() as client,
    ):
        for name, core in cores.items():
            # The process has just begun: all of its threads are still to come.
            os.sched_setaffinity(cluster.processes[name].pid, {core})
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not (cluster.ready() and _ready(client, whole.url)):
            if dead := cluster.dead():
                raise RuntimeError("\n".join(dead[0].last_lines()))
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not ready within {READY_WITHIN_S} s")
            time.sleep(0.1)
        yield cluster


def timed(client: httpx.Client, url: str, prompt: list[int], n_new: int) -> Timing:
    """Stream one greedy completion."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": n_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # An event for each token: those of a random model may have no text.
        "return_token_ids": True,
    }
    began = time.perf_counter()
    arrivals: list[float] = []
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                if event["choices"]:
                    arrivals.append(time.perf_counter())
                    tokens += event["choices"][0].get("token_ids") or ()
    ttft_s = arrivals[0] - began
    tbt_s = (arrivals[-1] - arrivals[0]) / max(1, usage["completion_tokens"] - 1)
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Timing(ttft_s, tbt_s, n_cached, tuple(tokens))


def stage_seconds(client: httpx.Client, url: str) -> dict[str, tuple[float, int]]:
    """Seconds and observations of each stage of first tokens so far, from `/metrics`."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in client.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("halfmoon_ttft_stage_seconds_"):
            continue
        stage = line.split('stage="', 1)[1].split('"', 1)[0]
        value = float(line.rsplit(" ", 1)[1])
        if line.startswith("halfmoon_ttft_stage_seconds_sum"):
            sums[stage] = value
        elif line.startswith("halfmoon_ttft_stage_seconds_count"):
            counts[stage] = int(value)
    return {stage: (sums[stage], counts[stage]) for stage in sums}


def _ready(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False
