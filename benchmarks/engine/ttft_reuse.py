"""Measure what a repeated prompt saves: TTFT of a prompt, and of the same prompt again.

Through servers, with one client: Halfmoon with 1 prefill, 1 decode and 1 kvstore, and vLLM's own
server with its prefix cache. Both are up; one works while the other sleeps. A prompt has one token
more than whole blocks of either, so both find all but the last token in their caches.
"""

import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.cluster import Timing, running, timed
from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.rounds import VLLM, RunChoices
from benchmarks.engine.shapes import ModelShape, Precision
from benchmarks.vllm_cpu import vllm_server, wait_ready
from halfmoon_metadata.tcp_ports import free_port

PROMPT_TOKENS = 4097
_VOCABULARY = range(300, 4000)
_NEW_TOKENS = 16


def measure_reuse(shape: ModelShape, precision: Precision, choices: RunChoices, logs: Path) -> str:
    """Return a table; a system that does not start is named below it."""
    dice = random.Random(1)
    opened: dict[str, str] = {}
    notes: list[str] = []
    misses: dict[str, list[Timing]] = {}
    hits: dict[str, list[Timing]] = {}
    with ExitStack() as stack:
        for system in choices.systems:
            if (server := _SERVERS.get(system)) is None:
                continue
            try:
                opened[system] = stack.enter_context(server(shape, precision, choices, logs))
            except (RuntimeError, OSError) as error:
                notes.append(f"{system}: {error}")
        client = stack.enter_context(httpx.Client())
        for url in opened.values():
            timed(client, url, dice.choices(_VOCABULARY, k=512), _NEW_TOKENS)
        for _ in range(choices.rounds):
            for system, url in opened.items():
                prompt = dice.choices(_VOCABULARY, k=PROMPT_TOKENS)
                misses.setdefault(system, []).append(timed(client, url, prompt, _NEW_TOKENS))
                hits.setdefault(system, []).append(timed(client, url, prompt, _NEW_TOKENS))
    return "\n".join([reuse_table(shape.name, precision, misses, hits), *notes])


def reuse_table(
    name: str,
    precision: str,
    misses: dict[str, list[Timing]],
    hits: dict[str, list[Timing]],
) -> str:
    """Return a row per system: medians of both, and how many times as fast a hit is."""
    heads = "miss | hit | miss / hit | cached tokens"
    lines = [f"| {name}, {precision}: TTFT of {PROMPT_TOKENS:,} tokens | {heads} |"]
    lines.append("|---|---|---|---|---|")
    for system in misses:
        miss = statistics.median(each.ttft_s for each in misses[system])
        hit = statistics.median(each.ttft_s for each in hits[system])
        cells = f"{miss * 1e3:,.0f} ms | {hit * 1e3:,.1f} ms | {miss / hit:.0f}"
        lines.append(f"| {system} | {cells} | {hits[system][-1].n_cached:,} |")
    return "\n".join(lines)


@contextmanager
def _ours(
    shape: ModelShape, precision: Precision, choices: RunChoices, logs: Path
) -> Iterator[str]:
    flags = [f"--dtype={precision}", f"--threads={choices.threads}"]
    extra = {"prefill": flags, "decode": flags}
    with running(str(model_folder(shape)), extra=extra) as url:
        yield url


@contextmanager
def _vllm(
    shape: ModelShape, precision: Precision, choices: RunChoices, logs: Path
) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--dtype", precision]
    flags += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    flags += ["--kv-cache-memory-bytes", str(2**30)]
    if choices.eager:
        flags.append("--enforce-eager")
    with vllm_server(
        model_folder(shape), port, logs, threads=choices.threads, flags=flags
    ) as process:
        wait_ready(f"{url}/health", [process], logs)
        yield url


_SERVERS = {"halfmoon": _ours, VLLM: _vllm}
