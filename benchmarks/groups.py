"""Measure what a group of two prefill workers gains: TTFT with it, over TTFT without it.

`python -m benchmarks.groups` runs two clusters side by side, both of two prefill workers, each
pinned to a core of its own. In one the workers form a group, in the other each works alone. Rounds
alternate between the clusters, and the other one is idle meanwhile. Printed are medians and their
ratios:

- a long prompt of which nothing is cached, and one of which the first half is;
- short prompts with nothing beside them, and beside one and two streams of long prompts.

Rounds of long prompts come first, then rounds of short ones. The command ends with an error if the
group did not compute a long prompt, or if another part than the first half was cached.

In the engine of all layers, the last layer computes only the rows that are wanted. So the last of
two stages has 9 of 16 layers, and some 8 of 15 layers' work; the first one has the other 7.
"""

import argparse
import os
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Timing, running_cluster, timed
from benchmarks.engine.random_weights import model_folder
from benchmarks.engine.shapes import SHAPES
from benchmarks.model import VOCABULARY
from halfmoon_cli.up.embedded_cluster import EmbeddedCluster

#: Names of the clusters, as in the table.
GROUP, ALONE = "group of 2", "2 alone"
UNCACHED, HALF = "long, nothing cached", "long, half cached"
SHORT = "short"
#: Seconds between two short prompts: more than one takes.
_PAUSE_S = 0.1
#: Seconds in which a prompt's blocks are kept and known, once it is answered.
_KEPT_S = 0.5
#: Streams of long prompts beside short ones.
_STREAMS = (0, 1, 2)


class Client:
    """Sends prompts to one cluster, each with tokens of its own."""

    def __init__(self, cluster: EmbeddedCluster, seed: int) -> None:
        self.cluster = cluster
        self.dice = random.Random(seed)
        self.http = httpx.Client()

    def ask(self, prompt: list[int]) -> Timing:
        """Stream a prompt and two tokens of its answer."""
        return timed(self.http, self.cluster.plan.url, prompt, 2)

    def new_tokens(self, n: int) -> list[int]:
        """Draw tokens that no prompt has begun with."""
        return self.dice.choices(VOCABULARY, k=n)

    def n_shares(self) -> int:
        """Return how many prompts the last member has computed a stage of."""
        members = sorted(name for name in self.cluster.processes if name.startswith("prefill"))
        operators = self.cluster.processes[members[-1]].status["operators"]
        for line in self.http.get(f"{operators}/metrics").text.splitlines():
            if line.startswith("halfmoon_prefill_shares_total"):
                return int(float(line.rpartition(" ")[2]))
        return 0


def long_prompts(client: Client, n_tokens: int) -> dict[str, float]:
    """Send a prompt, and one whose first half is the first half of it; return both TTFTs.

    Raises:
        RuntimeError: of the second one, another part than its first half was cached.
    """
    prompt = client.new_tokens(n_tokens)
    half = n_tokens // 2
    uncached = client.ask(prompt)
    time.sleep(_KEPT_S)
    cached = client.ask([*prompt[:half], *client.new_tokens(n_tokens - half)])
    if uncached.n_cached or cached.n_cached != half:
        raise RuntimeError(
            f"{uncached.n_cached} and {cached.n_cached} tokens were cached, not 0 and {half}"
        )
    return {UNCACHED: uncached.ttft_s, HALF: cached.ttft_s}


def short_prompts(client: Client, n: int, n_tokens: int) -> list[float]:
    """Send short prompts, one after another; return their TTFTs."""
    found = []
    for _ in range(n):
        found.append(client.ask(client.new_tokens(n_tokens)).ttft_s)
        time.sleep(_PAUSE_S)
    return found


@contextmanager
def streams_of_long_prompts(client: Client, n_streams: int, n_tokens: int) -> Iterator[None]:
    """Send long prompts meanwhile, each stream one after another."""
    ends = threading.Event()

    def stream(seed: int) -> None:
        own = Client(client.cluster, seed)
        while not ends.is_set():
            own.ask(own.new_tokens(n_tokens))

    threads = [
        threading.Thread(target=stream, args=(client.dice.random(),)) for _ in range(n_streams)
    ]
    for thread in threads:
        thread.start()
    try:
        if threads:
            time.sleep(5 * _PAUSE_S)
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def row_name(n_streams: int) -> str:
    """Return the table's name of short prompts beside so many streams."""
    return f"{SHORT}, beside {n_streams} streams of long ones" if n_streams else f"{SHORT}, alone"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--shape", default="llama-16x512", choices=sorted(SHAPES))
    add("--tokens", type=int, default=8192, help="of a long prompt")
    add("--short-tokens", type=int, default=512)
    add("--shorts", type=int, default=4, help="short prompts of a round, at each load")
    add("--rounds", type=int, default=5, help="of long prompts, at the most")
    add("--short-rounds", type=int, default=2, help="of short prompts, at the most; 0: none")
    add("--seconds", type=float, default=200.0, help="after which no round begins")
    add("--chunk", type=int, default=0, help="--group-chunk-tokens of the group; 0: its default")
    add("--pool-mib", type=int, default=1024)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("this takes two cores, one for each prefill worker")
    folder = str(model_folder(SHAPES[options.shape]))
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in (GROUP, ALONE)}
    with ExitStack() as stack:
        clients = {
            name: Client(stack.enter_context(_running(folder, name, cores, options)), seed)
            for seed, name in enumerate(found)
        }
        for client in clients.values():
            long_prompts(client, options.tokens)  # warm
        ends_s = time.monotonic() + options.seconds
        n_rounds = 0
        while n_rounds < options.rounds and time.monotonic() < ends_s:
            n_rounds += 1
            for name, client in clients.items():
                before = client.n_shares()
                for row, seconds in long_prompts(client, options.tokens).items():
                    found[name][row].append(seconds)
                if (n := client.n_shares() - before) != (2 if name == GROUP else 0):
                    raise RuntimeError(f"{name}: the last member computed a stage of {n} prompts")
        for _ in range(options.short_rounds):
            for n_streams in _STREAMS:
                if time.monotonic() > ends_s:
                    break
                for name, client in clients.items():
                    with streams_of_long_prompts(client, n_streams, options.tokens):
                        found[name][row_name(n_streams)] += short_prompts(
                            client, options.shorts, options.short_tokens
                        )
    _print_table(found, n_rounds, options)


def _running(
    folder: str, name: str, cores: list[int], options: argparse.Namespace
) -> AbstractContextManager[EmbeddedCluster]:
    chunk = [f"--group-chunk-tokens={options.chunk}"] if options.chunk else []
    pool = [f"--pool-mib={options.pool_mib}"]
    return running_cluster(
        folder,
        cores={f"prefill-{i}": core for i, core in enumerate(cores)},
        n_prefill=2,
        group_size=2 if name == GROUP else 0,
        threads={"prefill": 1, "decode": 1},
        extra={"prefill": [*pool, *(chunk if name == GROUP else ())], "decode": pool},
    )


def _print_table(
    found: dict[str, dict[str, list[float]]], n_rounds: int, options: argparse.Namespace
) -> None:
    table = Table(
        title=f"TTFT in ms, medians of {n_rounds} rounds: {options.shape}, long prompts of "
        f"{options.tokens} tokens, short ones of {options.short_tokens}, one core a worker",
        box=None,
    )
    for column in ("prompts", "n", GROUP, ALONE, "group/alone", "least", "most"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for row, with_group in found[GROUP].items():
        alone = found[ALONE][row]
        ratio = statistics.median(with_group) / statistics.median(alone)
        pairs = [one / other for one, other in zip(with_group, alone, strict=True)]
        table.add_row(
            row,
            str(len(alone)),
            f"{1e3 * statistics.median(with_group):.0f}",
            f"{1e3 * statistics.median(alone):.0f}",
            f"{ratio:.2f}",
            f"{min(pairs):.2f}",
            f"{max(pairs):.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
