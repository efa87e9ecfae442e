"""Send a trace's blocks through live kvstore nodes with disks: `python -m benchmarks.kvpool TRACE`.

Requests of a trace of block ids (one JSON object per line with "hash_ids", as Mooncake publishes
them) go to two nodes, each conversation to one. Every request first gets the blocks that exist,
verified byte for byte, and then puts the others. Memory holds a tenth of the blocks, the disk all.
Beside each node, the same policy without bytes counts its hits.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.nodes import kvstore_nodes, metadata_server, record_of
from halfmoon_metadata import open_store
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_protocol.ids import BlockHash
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_testing.block_client import SMALL_LAYOUT, BlockClient, InstantTiers

NAMES = ("kvstore-0", "kvstore-1")
_MIB = 1024 * 1024


def main() -> None:
    """Replay, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--eviction", default="patience")
    given = parser.parse_args()
    with given.trace.open() as lines:
        rows = [json.loads(line)["hash_ids"] for _, line in zip(range(given.requests), lines)]  # noqa: B905
    asyncio.run(replay([[_block(i) for i in row] for row in rows], given.eviction))


async def replay(requests: Sequence[Sequence[BlockHash]], policy: str) -> None:
    """Send them all, then print what happened."""
    n_blocks = max(len({b for r in requests if _node(r) == i for b in r}) for i in range(2))
    memory_mib = max(1, n_blocks // 10 * SMALL_LAYOUT.block_bytes // _MIB)
    disk_mib = n_blocks * SMALL_LAYOUT.block_bytes * 5 // 4 // _MIB + 1
    alone = [InstantTiers(memory_mib * 256, disk_mib * 256, policy) for _ in NAMES]
    known: list[set[BlockHash]] = [set() for _ in NAMES]
    found = [0, 0]
    ports = [free_port() for _ in NAMES]
    with (
        tempfile.TemporaryDirectory() as folder,
        metadata_server() as url,
        kvstore_nodes(
            Path(folder),
            url,
            {
                name: {
                    "metrics-port": port,
                    "capacity-mib": memory_mib,
                    "eviction": policy,
                    "promotion-wait-s": 60,
                    "disk-path": Path(folder) / name,
                    "disk-mib": disk_mib,
                }
                for name, port in zip(NAMES, ports, strict=True)
            },
        ) as processes,
    ):
        started_s = time.monotonic()
        async with AsyncExitStack() as stack:
            clients = [await _client(stack, url, name) for name in NAMES]
            rest = [_rss_mib(p.pid) for p in processes]
            for request in requests:
                i = _node(request)
                there = await clients[i].get(request)
                expected = next(
                    (n for n, b in enumerate(request) if b not in known[i]), len(request)
                )
                if len(there) != expected:
                    raise SystemExit(f"{len(there)} blocks found, {expected} were put")
                found[i] += len(there)
                await clients[i].put(request)
                known[i].update(request)
                alone[i].get(request)
                alone[i].put(request)
            seconds = time.monotonic() - started_s
        live = [_lookups(port) for port in ports]
        grown = [_rss_mib(p.pid) - r for p, r in zip(processes, rest, strict=True)]
    table = Table(title=f"{len(requests)} requests, {seconds:.0f} s, {policy}")
    for column in (
        "node", "blocks", "of them in memory", "asked for", "hit", "hit in memory",
        "the same, policy alone", "memory grew, MiB",
    ):  # fmt: skip
        table.add_column(column)
    for i, name in enumerate(NAMES):
        asked, counts = sum(live[i].values()), alone[i].tiers.counts
        n_alone = counts.hits_memory + counts.hits_disk + counts.misses
        table.add_row(
            name, f"{len(known[i])}", f"{memory_mib * 256}", f"{asked:.0f}",
            f"{found[i] / asked:.4f}", f"{live[i]['memory'] / asked:.4f}",
            f"{counts.hits_memory / n_alone:.4f}", f"{grown[i]:.0f}",
        )  # fmt: skip
    Console(width=140).print(table)


def _rss_mib(pid: int) -> float:
    """Memory of a process, shared pages included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} is gone")


def _block(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def _node(request: Sequence[BlockHash]) -> int:
    """By the conversation: its second block, since all share the first."""
    return request[min(1, len(request) - 1)][-1] % 2


async def _client(stack: AsyncExitStack, metadata: str, name: str) -> BlockClient:
    store = open_store(metadata)
    stack.callback(store.close)
    network = ZmqNetwork()
    stack.push_async_callback(network.close)
    client = await BlockClient.dial(network, store, record_of(store, name), f"client-of-{name}")
    return await stack.enter_async_context(client)


def _lookups(port: int) -> dict[str, float]:
    rows = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines()
    start = 'halfmoon_kvstore_lookup_blocks_total{tier="'
    pairs = [row.removeprefix(start).split('"} ') for row in rows if row.startswith(start)]
    return {kind: float(value) for kind, value in pairs}


if __name__ == "__main__":
    main()
