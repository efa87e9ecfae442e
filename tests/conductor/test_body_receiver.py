"""Bodies as they arrive over real sockets: slow ones, half-sent ones, many, and clients that go."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client import CollectorRegistry

from halfmoon_conductor.http_server.body_receiver import BodyLimits
from halfmoon_conductor.routes.rest_app import RestLimits, create_app
from halfmoon_conductor.tenants import Tenant, Tenants, hash_api_key
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_testing.conductor_http import ScriptedGateway, serve_app
from tests.conductor.fronts import until

DEADLINE_S = 10
BODY = json.dumps({"model": "lab/moon", "prompt": "a", "max_tokens": 2}).encode()
KEY = "authorization: Bearer k\r\n"


class Asked(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return int((await self.reader.readline()).split()[1])

    async def error(self) -> tuple[int, Any, str]:
        """Status, code and message of an error, behind which the server hangs up."""
        async with asyncio.timeout(DEADLINE_S):
            head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        error = json.loads(body)["error"]
        return int(head.split()[1]), error["code"], error["message"]


class Server(NamedTuple):
    """The REST API behind a socket, with requests written by hand."""

    address: tuple[str, int]

    async def ask(self, *pieces: bytes, n_bytes: int | None = None, headers: str = "") -> Asked:
        """Send a head, and these pieces of a body that is said to have so many bytes."""
        asked = Asked(*await asyncio.open_connection(*self.address))
        length = sum(map(len, pieces)) if n_bytes is None else n_bytes
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: front\r\n{headers}"
            f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        )
        for piece in (head.encode(), *pieces):
            asked.writer.write(piece)
            await asked.writer.drain()
        return asked

    async def load(self) -> Any:
        async with httpx.AsyncClient() as client:
            url = "http://{}:{}/load".format(*self.address)
            return (await client.get(url)).json()["server_load"]


Open = Callable[..., Any]


@pytest.fixture
async def open_server(
    gateway: ScriptedGateway, tokenizer: HubTokenizer, registry: CollectorRegistry
) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def open_it(*tenants: Tenant, max_concurrent: int = 100, **bodies: Any) -> Server:
            limits = RestLimits(bodies=BodyLimits(**bodies), max_concurrent=max_concurrent)
            known = Tenants(tenants) if tenants else None
            app = create_app(gateway, tokenizer, registry=registry, limits=limits, tenants=known)
            return Server(await stack.enter_async_context(serve_app(app)))

        yield open_it


async def test_half_sent_bodies_hold_no_place(open_server: Open) -> None:
    lab = Tenant("lab", (hash_api_key("k"),), max_concurrent=1)
    server = await open_server(lab, max_concurrent=1)
    half = [await server.ask(BODY[:10], n_bytes=len(BODY), headers=KEY) for _ in range(20)]
    whole = await server.ask(BODY, headers=KEY)
    assert await whole.status() == 200
    assert await server.load() == 0
    half[0].writer.write(BODY[10:])
    assert await half[0].status() == 200
    for each in (whole, *half):
        each.writer.close()


@pytest.mark.parametrize("sent", [b"", BODY[:10]])
async def test_a_body_that_does_not_come_is_refused(open_server: Open, sent: bytes) -> None:
    server = await open_server(timeout_s=0.2)
    status, code, message = await (await server.ask(sent, n_bytes=len(BODY))).error()
    assert (status, code) == (408, "request_timeout")
    assert f"{len(sent)} bytes" in message and "0.2 s" in message


async def test_a_body_that_drips_is_refused_however_long_it_could_go_on(open_server: Open) -> None:
    server = await open_server(timeout_s=0.5, least_bytes_per_s=1000)
    asked = await server.ask(b"", n_bytes=1_000_000)

    async def drip() -> None:
        while True:
            asked.writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    status, code, _ = await asked.error()
    dripping.cancel()
    assert (status, code) == (408, "request_timeout")


async def test_a_body_is_not_read_before_its_key_is_known_or_if_it_announces_too_many_bytes(
    open_server: Open,
) -> None:
    server = await open_server(Tenant("lab", (hash_api_key("k"),)))
    asked = await server.ask(n_bytes=5_000_000)
    assert await asked.status() == 401
    asked.writer.close()
    announced = await server.ask(n_bytes=999_999_999, headers=KEY)
    assert (await announced.error())[:2] == (413, "body_too_large")


async def test_large_bodies_are_refused_while_there_are_too_many_and_small_ones_are_not(
    open_server: Open,
) -> None:
    server = await open_server(max_total_bytes=300_000)
    big = b" " * 200_000
    first = await server.ask(big, n_bytes=len(big) + len(BODY))
    second = await server.ask(big, n_bytes=len(big) + len(BODY))
    status, code, message = await second.error()
    assert (status, code) == (429, "overloaded") and "300000" in message
    assert await (await server.ask(BODY)).status() == 200
    first.writer.write(BODY)
    assert await first.status() == 200
    assert await (await server.ask(big, BODY)).status() == 200, "the first one's are given back"


@pytest.mark.parametrize("n_sent", [0, 10])
async def test_a_client_that_goes_before_its_body_is_there_leaves_nothing_behind(
    open_server: Open, gateway: ScriptedGateway, registry: CollectorRegistry, n_sent: int
) -> None:
    asked = await (await open_server()).ask(BODY[:n_sent], n_bytes=len(BODY))
    asked.writer.close()
    labels = {"route": "unmatched", "status": "499"}
    await until(lambda: registry.get_sample_value("halfmoon_http_requests_total", labels))
    assert not gateway.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_before_pause", [0, 1])
async def test_a_client_that_goes_frees_its_place_and_ends_its_generation(
    open_server: Open,
    gateway: ScriptedGateway,
    registry: CollectorRegistry,
    stream: bool,
    n_before_pause: int,
) -> None:
    gateway.n_before_pause = n_before_pause
    server = await open_server(max_concurrent=1)
    asked = await server.ask(json.dumps({**json.loads(BODY), "stream": stream}).encode())
    await until(lambda: gateway.live)
    assert await server.load() == 1
    asked.writer.close()
    await until(lambda: gateway.cancelled)
    assert not gateway.live
    ended = "halfmoon_request_success_total", {"finished_reason": "abort"}
    await until(lambda: registry.get_sample_value(*ended) == 1)
    gateway.n_before_pause = None
    async with asyncio.timeout(DEADLINE_S):
        while await server.load():
            await asyncio.sleep(0.005)
    assert await (await server.ask(BODY)).status() == 200
