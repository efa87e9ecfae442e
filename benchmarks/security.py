"""Measure what a cluster key costs: `python -m benchmarks.security`.

Two clusters serve one model, one with a cluster key and one without, in turns. KV goes over TCP in
both, as between hosts. A key encrypts KV, unless `transfer_encryption` is off. Two processes move
blocks besides, without key, with key and encryption, and with the key alone. More sizes, and both
implementations: `python -m benchmarks.transfer.encryption`.
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
from benchmarks.transfer.encryption import OPS, TransferEnds
from halfmoon_transfer import ClusterKey, TransferSettings

_SECRET = "only good for a benchmark"
_KEY = {"HALFMOON_CLUSTER_KEY": _SECRET}
_OPEN = {"HALFMOON_CLUSTER_KEY": ""}
N_NEW = 64
_MIB = 1024 * 1024
#: By the words that a row adds: how blocks are moved with the key.
_KEYED = {
    "": TransferSettings(cluster_key=ClusterKey(_SECRET)),
    ", key without encryption": TransferSettings(cluster_key=ClusterKey(_SECRET), encryption=False),
}
#: Figures by name, of each round without and with the key.
Figures = dict[str, tuple[list[float], list[float]]]


def main() -> None:
    """Measure all figures in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-8x512", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--streams", type=int, default=8, help="at once, for tokens per second")
    parser.add_argument("--mib", default="1,16", help="per block that is moved, for GB/s")
    parser.add_argument("--seconds", type=float, default=0.5, help="of moves, per round")
    options = parser.parse_args()
    folder = str(model_folder(SHAPES[options.shape]))
    figures: Figures = {}
    with ExitStack() as stack:
        urls = [stack.enter_context(_cluster(folder, settings)) for settings in (_OPEN, _KEY)]
        for url in urls:  # the first of all are slower
            _measure(url, options)
        for _ in range(options.rounds):
            for index, url in enumerate(urls):
                for name, figure in _measure(url, options).items():
                    figures.setdefault(name, ([], []))[index].append(figure)
    for mib in map(int, options.mib.split(",")):
        _measure_moves(mib, options, figures)
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


def _measure_moves(mib: int, options: argparse.Namespace, figures: Figures) -> None:
    """Add the speeds of one size of blocks, in turns."""
    with ExitStack() as stack:
        clear = stack.enter_context(TransferEnds(mib * _MIB, TransferSettings()))
        keyed = {
            words: stack.enter_context(TransferEnds(mib * _MIB, settings))
            for words, settings in _KEYED.items()
        }
        for _ in range(options.rounds):
            for op in OPS:
                for words, ends in keyed.items():
                    row = figures.setdefault(f"{op}s of {mib} MiB, GB/s{words}", ([], []))
                    for figure, each in zip(row, (clear, ends), strict=True):
                        figure.append(each.measure(op, options.seconds)[0])


if __name__ == "__main__":
    main()
