"""Hundreds of streams, and what their clients do all at once, cost no worker."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import LiveCluster

pytestmark = pytest.mark.e2e

#: Streams at a time with 20 candidates a token.
N_STREAMS = int(os.environ.get("HALFMOON_STREAMS", "60"))
#: Requests that are cancelled in all, and in one burst.
N_CANCELS = int(os.environ.get("HALFMOON_CANCELS", "1000"))
N_IN_BURST = 250
StartCluster = Callable[..., Any]


class Stream:
    """A client's connection with one streamed answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, cluster: LiveCluster, **body: Any) -> "Stream":
        where = urlsplit(cluster.url)
        stream = cls(*await asyncio.open_connection(where.hostname, where.port))
        content = json.dumps({"stream": True, "temperature": 0, **body}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        stream.writer.write(head.encode() + content)
        return stream

    async def until_event(self, n: int) -> None:
        """Read until the nth event."""
        status = await self.reader.readline()
        assert b" 200 " in status, status
        while n:
            line = await self.reader.readline()
            assert line and b'"error"' not in line, line
            n -= line.startswith(b"data:")

    def hang_up(self) -> None:
        self.writer.transport.abort()


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Any:
    with start_cluster("fake://tiny?step_s=0.02", n_decode=2, n_kvstore=1) as cluster:
        yield cluster


def test_streams_with_candidates_that_all_hang_up_cost_no_worker(cluster: LiveCluster) -> None:
    async def load(model: str) -> None:
        streams = [
            await Stream.ask(cluster, model=model, prompt=[7, i, 9], max_tokens=3000, logprobs=20)
            for i in range(N_STREAMS)
        ]
        await asyncio.gather(*(stream.until_event(20) for stream in streams))
        for stream in streams:
            stream.hang_up()

    nobody_is_lost(cluster, load)


def test_thousands_of_cancels_in_bursts_cost_no_worker(cluster: LiveCluster) -> None:
    async def load(model: str) -> None:
        for burst in range(N_CANCELS // N_IN_BURST):
            streams = [
                await Stream.ask(cluster, model=model, prompt=[burst, i % 900, 5], max_tokens=3000)
                for i in range(N_IN_BURST)
            ]
            await streams[0].until_event(3)  # the others decode, are computed, or wait
            for stream in streams:
                stream.hang_up()

    nobody_is_lost(cluster, load)


def nobody_is_lost(cluster: LiveCluster, load: Callable[[str], Awaitable[None]]) -> None:
    before = cluster.live()
    right = ask(cluster)
    asyncio.run(load(cluster.model))  # type: ignore[arg-type]
    assert ask(cluster) == right
    cluster.until(lambda: not any(cluster.get("/debug/cluster")["requests"].values()))
    assert cluster.live() == before
    assert not cluster.get("/debug/cluster")["gone"]


def ask(cluster: LiveCluster) -> Any:
    return cluster.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)["choices"]
