"""Hundreds of streams that their clients hang up on at once cost no worker."""

import asyncio
import json
import os
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import LiveCluster, StartCluster
from tests.nightly import by_day

pytestmark = pytest.mark.e2e

#: Requests that are cancelled in all, and in one burst.
N_CANCELS = int(os.environ.get("HALFMOON_CANCELS") or by_day(500, at_night=2000))
N_IN_BURST = 250
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begin(cluster: LiveCluster, **body: Any) -> Stream:
    """Ask for a streamed answer, by a connection of its own."""
    where = urlsplit(cluster.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    content = json.dumps({"stream": True, "temperature": 0, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    return reader, writer


async def until_event(reader: asyncio.StreamReader, n: int) -> None:
    """Read until the nth event."""
    status = await reader.readline()
    assert b" 200 " in status, status
    while n:
        line = await reader.readline()
        assert line and b'"error"' not in line, line
        n -= line.startswith(b"data:")


def test_thousands_of_cancels_in_bursts_cost_no_worker(start_cluster: StartCluster) -> None:
    async def load(cluster: LiveCluster, model: str) -> None:
        for burst in range(N_CANCELS // N_IN_BURST):
            streams = [
                await begin(cluster, model=model, prompt=[burst, i % 900, 5], max_tokens=3000)
                for i in range(N_IN_BURST)
            ]
            await until_event(streams[0][0], 3)  # the others decode, are computed, or wait
            for _, writer in streams:
                writer.transport.abort()

    def ask() -> Any:
        return cluster.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)["choices"]

    with start_cluster("fake://tiny?step_s=0.02", n_decode=2, n_kvstore=1) as cluster:
        before, right = cluster.live(), ask()
        asyncio.run(load(cluster, cluster.model))
        assert ask() == right
        cluster.until(lambda: not sum(cluster.get("/debug/cluster")["requests"].values()))
        assert cluster.live() == before
        assert not cluster.get("/debug/cluster")["gone"]
