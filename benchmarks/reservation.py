"""Measure the reservation of decode pages before prefill: one round trip, beside a whole TTFT.

The alternative, telling prefill at once and decode at the same time, would save that round
trip and pay with prefills whose decode worker turns out to be full.
"""

import asyncio
import statistics
import time

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import running_cluster, timed
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import Cancel, DecodeReserved, ReserveDecode, WorkerInfo
from halfmoon_protocol.sampling import Stopping
from halfmoon_runtime.channels.zmq_network import ZmqNetwork

MODEL = "fake://bench?layers=2&kv_heads=1&head_dim=8"


def run(console: Console, n: int = 500) -> None:
    """Measure on an idle decode worker of a running cluster."""
    with running_cluster(MODEL) as cluster, httpx.Client() as client:
        url, metadata = cluster.plan.url, cluster.plan.metadata_url
        ttfts = [timed(client, url, [1, 2, i], 2).ttft_s for i in range(100)][20:]
        record = client.get(metadata, params={"key": "halfmoon/members/decode-0"}).content
        worker = msgspec.json.decode(record, type=WorkerInfo)
        trips = asyncio.run(_round_trips(worker, n))
    table = Table(title=f"Reserving pages at decode, medians of {n}", box=None)
    for column in ("round trip p50", "p99", "TTFT p50", "round trip / TTFT"):
        table.add_column(column, justify="right")
    trip, ttft = statistics.median(trips), statistics.median(ttfts)
    table.add_row(
        f"{trip * 1e3:.2f} ms",
        f"{sorted(trips)[int(n * 0.99)] * 1e3:.2f} ms",
        f"{ttft * 1e3:.1f} ms",
        f"{trip / ttft:.2f}",
    )
    console.print(table)


async def _round_trips(worker: WorkerInfo, n: int) -> list[float]:
    network = ZmqNetwork()
    link = await network.dial(worker.commands)
    seconds: list[float] = []
    for i in range(n):
        request_id = RequestId(f"bench-{i}")
        began = time.perf_counter()
        await link.send(
            ReserveDecode(
                request_id=request_id, n_tokens=1000, stopping=Stopping(max_new_tokens=16)
            )
        )
        while not isinstance(await link.receive(), DecodeReserved):
            pass
        seconds.append(time.perf_counter() - began)
        await link.send(Cancel(request_id=request_id))
    await network.close()
    return seconds
