"""Hundreds of streams, and what their clients do all at once, cost no worker."""

import asyncio
import json
import os
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from halfmoon_engine.fake_engine import FakeEngine, parse_fake_spec
from tests.e2e.conftest import LiveCluster, StartCluster
from tests.nightly import by_day

pytestmark = pytest.mark.e2e

#: Requests that are cancelled in all, and in one burst.
N_CANCELS = int(os.environ.get("HALFMOON_CANCELS") or by_day(500, at_night=2000))
N_IN_BURST = 250


class Stream:
    """A client's connection with one streamed answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, cluster: LiveCluster, **body: Any) -> "Stream":
        where = urlsplit(cluster.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        connection.connect((where.hostname, where.port))
        stream = cls(*await asyncio.open_connection(sock=connection, limit=8 * 1024))
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

    async def tokens(self, n: int) -> list[int]:
        """Read events until they have brought n tokens."""
        tokens: list[int] = []
        while len(tokens) < n:
            line = await self.reader.readline()
            assert line, f"the stream ended after {len(tokens)} tokens"
            if line.startswith(b"data:"):
                for choice in json.loads(line.removeprefix(b"data:"))["choices"]:
                    tokens += choice["token_ids"] or ()
        return tokens[:n]

    def hang_up(self) -> None:
        self.writer.transport.abort()


def test_thousands_of_cancels_in_bursts_cost_no_worker(start_cluster: StartCluster) -> None:
    async def load(cluster: LiveCluster, model: str) -> None:
        for burst in range(N_CANCELS // N_IN_BURST):
            streams = [
                await Stream.ask(cluster, model=model, prompt=[burst, i % 900, 5], max_tokens=3000)
                for i in range(N_IN_BURST)
            ]
            await streams[0].until_event(3)  # the others decode, are computed, or wait
            for stream in streams:
                stream.hang_up()

    with start_cluster("fake://tiny?step_s=0.02", n_decode=2, n_kvstore=1) as cluster:
        before, right = cluster.live(), ask(cluster)
        asyncio.run(load(cluster, cluster.model))
        assert ask(cluster) == right
        cluster.until(lambda: not n_requests(cluster))
        assert cluster.live() == before
        assert not cluster.get("/debug/cluster")["gone"]


def test_clients_that_read_nothing_hold_no_place_and_get_the_rest_when_they_read_on(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_MAX_RUNNING", "4")
    model = "fake://tiny?max_context=8192&step_s=0.01"
    n_new, n_read = 7000, 2000
    right = FakeEngine(parse_fake_spec(model)).expected((7, 0, 9), n_read)
    with start_cluster(model, n_kvstore=1) as cluster:
        ask(cluster)

        async def load(model: str) -> None:
            body = {"model": model, "max_tokens": n_new, "return_token_ids": True}
            streams = [await Stream.ask(cluster, prompt=[7, i, 9], **body) for i in range(4)]
            await asyncio.gather(*(stream.until_event(1) for stream in streams))
            await asyncio.to_thread(cluster.until, lambda: not n_requests(cluster), 40.0)
            await asyncio.to_thread(ask, cluster)
            assert await streams[0].tokens(n_read) == right
            for stream in streams:
                stream.hang_up()

        asyncio.run(load(cluster.model))


def n_requests(cluster: LiveCluster) -> int:
    return sum(cluster.get("/debug/cluster")["requests"].values())


def ask(cluster: LiveCluster) -> Any:
    return cluster.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)["choices"]
