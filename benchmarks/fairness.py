"""Measure what one tenant's flood does to another tenant's time to first token.

    python -m benchmarks.fairness

An honest tenant that uses less than its share sends prompts one after the other: alone, then beside
each kind of flood, alternating. The engine is the fake one, whose passes take a time by their
tokens. So what is measured is the order of work, and not the cores that both share.
"""

import argparse
import json
import multiprocessing
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.cluster import running
from halfmoon_conductor.tenants import add_tenant

#: 2,500 tokens of prompts a second, and a step of 10 ms at least.
MODEL = "fake://fair?step_s=0.01&token_s=0.0004&max_context=16384"
N_FLOODERS = 32
#: Tokens at random that a new prompt begins with.
_N_HEAD = 16


def main() -> None:
    """Run all floods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each flood")
    parser.add_argument("--requests", type=int, default=8, help="honest requests each time")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens of a prefill pass")
    parser.add_argument("--floods", nargs="+", choices=FLOODS, default=list(FLOODS))
    parser.add_argument(
        "--running",
        type=int,
        default=64,
        help="requests at decode at once; fewer than 32 for a flood that fills it",
    )
    parser.add_argument("--no-shares-decode", action="store_true", help="let long answers stay")
    options = parser.parse_args()
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        honest, flood = (add_tenant(tenants, name) for name in ("honest", "flood"))
        chunk = str(options.chunk_tokens)
        extra = {
            "conductor": ["--tenants", str(tenants)]
            + ["--no-shares-decode"] * options.no_shares_decode,
            "decode": ["--max-running", str(options.running)],
            "prefill": ["--chunk-tokens", chunk, "--max-chunk-tokens", chunk],
        }
        with running(MODEL, n_prefill=1, n_decode=1, n_kvstore=1, extra=extra) as url:
            _measure(url, honest, flood, options)


def _measure(url: str, honest: str, flood: str, options: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {name: [] for name in options.floods}
    alone: dict[str, list[float]] = {name: [] for name in options.floods}
    rounds = [name for _ in range(options.rounds) for name in options.floods]
    for name in track(rounds, "floods", console=Console(stderr=True)):
        alone[name].append(_median_ttft_s(url, honest, options.requests))
        with flooding(url, flood, name):
            found[name].append(_median_ttft_s(url, honest, options.requests))
    print("| flood | TTFT alone | beside it | ratio |\n|---|---|---|---|")
    for name in options.floods:
        before, beside = statistics.median(alone[name]), statistics.median(found[name])
        print(f"| {name} | {before * 1e3:.0f} ms | {beside * 1e3:.0f} ms | {beside / before:.2f} |")


class Client:
    """One connection of a tenant."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, timeout=600, headers={"authorization": f"Bearer {key}"}
        )
        self._dice = random.Random()
        #: What new prompts end with. To draw each anew would take the cores that are measured.
        self._tail: list[int] = []

    def ask(self, n_prompt: int, n_new: int) -> float:
        """Send a prompt that is new, and read its answer; return the time to first token."""
        return self.ask_for(self.new_prompt(n_prompt), n_new)

    def new_prompt(self, n_tokens: int) -> list[int]:
        """Return token ids of which no block was seen before: they begin at random."""
        if len(self._tail) < n_tokens:
            self._tail = [self._dice.randrange(200) for _ in range(n_tokens)]
        head = [self._dice.randrange(200) for _ in range(min(n_tokens, _N_HEAD))]
        return head + self._tail[len(head) : n_tokens]

    def ask_for(self, prompt: list[int], n_new: int) -> float:
        """Send a prompt, and read its answer; return the time to first token, 0 if refused."""
        body = {"model": "bench", "prompt": prompt, "max_tokens": n_new, "stream": True}
        began_s = time.perf_counter()
        ttft_s = 0.0
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                time.sleep(0.05)
                return 0.0
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not ttft_s and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    ttft_s = time.perf_counter() - began_s
        return ttft_s

    def leave(self, n_prompt: int) -> None:
        """Send a prompt, and break the connection before its answer."""
        body = {
            "model": "bench",
            "prompt": self.new_prompt(n_prompt),
            "max_tokens": 64,
            "stream": True,
        }
        with suppress(httpx.TimeoutException):
            self._http.post("/v1/completions", json=body, timeout=0.1)


def _median_ttft_s(url: str, key: str, n: int) -> float:
    client, ttfts_s = Client(url, key), list[float]()
    for _ in range(n):
        time.sleep(1.0)
        ttfts_s.append(client.ask(2000, 4))
    return statistics.median(ttfts_s)


#: What each client of a flood sends, again and again.
FLOODS: dict[str, Callable[[Client], object]] = {
    "requests": lambda client: client.ask(200, 32),
    "long prompts": lambda client: client.ask(8000, 8),
    "cancels": lambda client: client.leave(4000),
    "long answers": lambda client: client.ask(200, 8000),
}


@contextmanager
def flooding(url: str, key: str, name: str) -> Iterator[None]:
    """Send a flood from many clients of a tenant while the block runs.

    They are threads of a process of their own: its end cuts their connections, and with them what
    they still wait for.
    """
    process = multiprocessing.get_context("spawn").Process(target=_flood, args=(url, key, name))
    process.start()
    time.sleep(4.0)  # queues are full
    try:
        yield
    finally:
        process.kill()
        process.join()


def _flood(url: str, key: str, name: str) -> None:
    def send() -> None:
        client = Client(url, key)
        while True:
            with suppress(httpx.HTTPError):
                FLOODS[name](client)

    for _ in range(N_FLOODERS):
        threading.Thread(target=send).start()


if __name__ == "__main__":
    main()
