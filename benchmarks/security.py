"""Measure what a cluster key costs: `python -m benchmarks.security`.

Two clusters serve one model, one with a cluster key and one without, in turns. KV goes over TCP in
both, as between hosts. For KV payloads alone see `python -m benchmarks.transfer.encryption`.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx

from benchmarks.cluster import Timing, running, timed
from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import SHAPES

_KEY = {"HALFMOON_CLUSTER_KEY": "only good for a benchmark"}
_OPEN = {"HALFMOON_CLUSTER_KEY": ""}
N_NEW = 64


def main() -> None:
    """Measure all figures in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8x512", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--streams", type=int, default=8, help="at once, for tokens per second")
    options = parser.parse_args()
    folder = str(model_folder(SHAPES[options.shape]))
    figures: dict[str, tuple[list[float], list[float]]] = {}
    with ExitStack() as stack:
        urls = [stack.enter_context(_cluster(folder, settings)) for settings in (_OPEN, _KEY)]
        for url in urls:  # the first of all are slower
            _measure(url, options)
        for _ in range(options.rounds):
            for index, url in enumerate(urls):
                for name, figure in _measure(url, options).items():
                    figures.setdefault(name, ([], []))[index].append(figure)
    print("| figure | without key | with key | ratio |\n|---|---|---|---|")
    for name, (without, with_key) in figures.items():
        before, after = statistics.median(without), statistics.median(with_key)
        ratio = statistics.median(b / a for a, b in zip(without, with_key, strict=True))
        print(f"| {name} | {before:.4g} | {after:.4g} | {ratio:.2f} |")


@contextmanager
def _cluster(folder: str, settings: Mapping[str, str]) -> Iterator[str]:
    with _environment({**settings, "HALFMOON_TRANSFER_BACKENDS": "tcp"}), running(folder) as url:
        yield url


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _measure(url: str, options: argparse.Namespace) -> dict[str, float]:
    dice = random.Random()

    def ask(prompt: list[int], n_new: int) -> Timing:
        with httpx.Client() as client:
            return timed(client, url, prompt, n_new)

    def prompt(n_tokens: int) -> list[int]:
        return [dice.randrange(1000) for _ in range(n_tokens)]

    long = prompt(options.tokens)
    first, again = ask(long, 8), ask(long, 8)
    began_s = time.perf_counter()
    with ThreadPoolExecutor(options.streams) as pool:
        list(pool.map(lambda tokens: ask(tokens, N_NEW), [prompt(16)] * options.streams))
    took_s = time.perf_counter() - began_s
    return {
        f"TTFT of {options.tokens} new tokens, s": first.ttft_s,
        f"TTFT of {options.tokens} tokens, cached, s": again.ttft_s,
        f"tokens/s of {options.streams} streams": options.streams * N_NEW / took_s,
    }


if __name__ == "__main__":
    main()
