"""Hold thousands of hostile connections to the REST API, and watch honest clients and memory.

    python -m benchmarks.edge --minutes 60 --connections 10000

Each hostile connection is of one kind, and comes back when the server closes it. None vanishes as a
host without power does: over loopback the kernel answers for each (docs/security.md). Those that
send whole requests have the key of a tenant with a limit; honest clients have another tenant's.
These ask on, and compare each answer with the first one. The table has a row for each tenth of the
time. The exit status is 1 if an honest answer was wrong or refused.
"""

import argparse
import asyncio
import random
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.progress import Progress

from benchmarks.cluster import Timing, running_cluster, timed
from halfmoon_conductor.tenants import add_tenant

MODEL = "fake://edge?step_s=0.005&token_s=0.00002&max_context=16384"
N_HONEST = 4
N_ROWS = 10
#: Streams that are never read hold a request of the engine each: few of all connections.
SHARE_OF_SLOW_READERS = 0.01
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_STREAM = b'{"model": "bench", "prompt": [1, 2, 3], "max_tokens": 8000, "stream": true}'


class Row(NamedTuple):
    """What was seen in one part of the time."""

    minutes: float
    n_open: int
    memory_mib: float
    n_descriptors: int
    ttfts_s: list[float]


def main() -> None:
    """Hold the connections for as long as is wanted, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=10_000, help="hostile ones, at once")
    parser.add_argument(
        "--max-concurrent", type=int, default=8, help="requests that the hostile tenant may run"
    )
    options = parser.parse_args()
    # As Ctrl-C does, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if options.connections + 512 > hard:
        raise SystemExit(
            f"--connections {options.connections} needs {options.connections + 512} open files; "
            f"the limit is {hard} (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, options.connections + 512), hard))
    with tempfile.TemporaryDirectory() as folder:
        tenants = Path(folder) / "tenants.toml"
        keys = [add_tenant(tenants, name) for name in ("honest", "hostile")]
        # The last tenant's table is the hostile one's.
        with tenants.open("a") as file:
            file.write(f"max_concurrent = {options.max_concurrent}\n")
        extra = {"conductor": ["--tenants", str(tenants)]}
        with running_cluster(MODEL, n_prefill=1, n_decode=1, n_kvstore=1, extra=extra) as cluster:
            edge = Edge(cluster.plan.url, cluster.processes["conductor-0"].pid, *keys)
            rows = asyncio.run(edge.run(options.minutes, options.connections))
    print("| minutes | open | conductor's memory | its descriptors | honest TTFT p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ttfts_s = sorted(row.ttfts_s) or [float("nan")]
        print(
            f"| {row.minutes:.1f} | {row.n_open} | {row.memory_mib:.0f} MiB "
            f"| {row.n_descriptors} | {statistics.median(ttfts_s) * 1e3:.0f} ms "
            f"| {ttfts_s[int(len(ttfts_s) * 0.99)] * 1e3:.0f} ms |"
        )
    print(f"\nHonest answers: {dict(edge.outcomes)}. Hostile connections: {dict(edge.n_opened)}.")
    sys.exit(0 if set(edge.outcomes) == {"right"} else 1)


class Edge:
    """Hostile and honest clients of one conductor.

    Args:
        url: of its REST API.
        pid: of its process, whose memory is watched.
        honest_key: the API key of the honest clients' tenant.
        hostile_key: the API key of the others' tenant.
    """

    def __init__(self, url: str, pid: int, honest_key: str, hostile_key: str) -> None:
        self._url = url
        self._honest = {"authorization": f"Bearer {honest_key}"}
        self._hostile = f"authorization: Bearer {hostile_key}\r\n".encode()
        self._address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
        self._process = Path(f"/proc/{pid}")
        self._n_open = 0
        self._ttfts_s: list[float] = []
        self._expected: tuple[int, ...] = ()
        #: Honest answers, by what they were.
        self.outcomes: Counter[str] = Counter()
        #: Hostile connections that were opened, by kind.
        self.n_opened: Counter[str] = Counter()

    async def run(self, minutes: float, n_connections: int) -> list[Row]:
        """Return a row for each part of the time."""
        self._expected = (await asyncio.to_thread(self._ask)).token_ids
        kinds = [self._idle, self._slow_head, self._slow_body, self._kept_alive, self._half_closed]
        n_slow = round(n_connections * SHARE_OF_SLOW_READERS)
        chosen = [self._slow_reader] * n_slow
        chosen += [kinds[i % len(kinds)] for i in range(n_connections - n_slow)]
        random.shuffle(chosen)
        hostile = [asyncio.create_task(self._again_and_again(kind)) for kind in chosen]
        honest = [asyncio.create_task(self._ask_on()) for _ in range(N_HONEST)]
        began_s = time.monotonic()
        rows = [self._row(began_s)]
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("edge", total=minutes)
            for part in range(1, N_ROWS + 1):
                while (passed := (time.monotonic() - began_s) / 60) < minutes * part / N_ROWS:
                    progress.update(task, completed=passed)
                    await asyncio.sleep(0.5)
                rows.append(self._row(began_s))
        for each in (*hostile, *honest):
            each.cancel()
        await asyncio.gather(*hostile, *honest, return_exceptions=True)
        return rows

    def _row(self, began_s: float) -> Row:
        ttfts_s, self._ttfts_s = self._ttfts_s, []
        pages = int((self._process / "statm").read_text().split()[1])
        return Row(
            minutes=(time.monotonic() - began_s) / 60,
            n_open=self._n_open,
            memory_mib=pages * resource.getpagesize() / 2**20,
            n_descriptors=len(list((self._process / "fd").iterdir())),
            ttfts_s=ttfts_s,
        )

    # -- honest --------------------------------------------------------------------------------

    def _ask(self) -> Timing:
        with httpx.Client(headers=self._honest) as client:
            return timed(client, self._url, list(range(100, 300)), 16)

    async def _ask_on(self) -> None:
        while True:
            try:
                timing = await asyncio.to_thread(self._ask)
            except (httpx.HTTPError, IndexError) as error:
                self.outcomes[type(error).__name__] += 1
            else:
                self.outcomes["right" if timing.token_ids == self._expected else "wrong"] += 1
                self._ttfts_s.append(timing.ttft_s)
            await asyncio.sleep(0.5)

    # -- hostile -------------------------------------------------------------------------------

    async def _again_and_again(self, kind: Callable[[socket.socket], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Not all in the same moment, neither at first nor after a timeout.
            await asyncio.sleep(random.uniform(0, 10))
            with socket.socket() as connection, suppress(OSError):
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await loop.sock_connect(connection, self._address)
                self.n_opened[kind.__name__.lstrip("_").replace("_", " ")] += 1
                self._n_open += 1
                try:
                    await kind(connection)
                finally:
                    self._n_open -= 1

    async def _idle(self, connection: socket.socket) -> None:
        await _read_to_end(connection)

    async def _slow_head(self, connection: socket.socket) -> None:
        await self._drip(connection, _HEAD + b"x-slow: " + b"a" * 10_000)

    async def _slow_body(self, connection: socket.socket) -> None:
        await self._drip(connection, b"{" * 10_000, _HEAD + b"content-length: 10000\r\n\r\n")

    async def _kept_alive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await _read_to_end(connection)

    async def _half_closed(self, connection: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(connection, _HEAD)
        connection.shutdown(socket.SHUT_WR)
        await _read_to_end(connection)

    async def _slow_reader(self, connection: socket.socket) -> None:
        head = _HEAD + self._hostile + f"content-length: {len(_STREAM)}\r\n\r\n".encode()
        await asyncio.get_running_loop().sock_sendall(connection, head + _STREAM)
        await asyncio.sleep(60)

    async def _drip(self, connection: socket.socket, data: bytes, at_once: bytes = b"") -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, at_once)
        closed = asyncio.create_task(_read_to_end(connection))
        try:
            for i in range(len(data)):
                if closed.done():
                    return
                await loop.sock_sendall(connection, data[i : i + 1])
                await asyncio.sleep(2)
        finally:
            closed.cancel()


async def _read_to_end(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while await loop.sock_recv(connection, 4096):
            pass


if __name__ == "__main__":
    main()
