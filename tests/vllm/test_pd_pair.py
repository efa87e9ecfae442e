"""A prefill/decode pair of stock vLLM servers answers as one server, and faults cost no token.

The last two tests kill servers: starting one again takes half a minute.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from halfmoon_servers.client.generate_call import GenerateCall
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_errors import NotServable, ServerGone, ServerRefused
from tests.vllm.conftest import prompt_of
from tests.vllm.stock_server import (
    NIXL_FLAGS,
    StockServer,
    complete,
    meet,
    nixl_variables,
    streamed,
    tokens_of,
)
from tests.vllm.test_kv_events import answer, call
from tests.vllm.test_route import Route

N_NEW = 24
#: New tokens of an answer that is still going on when its server is killed.
N_LONG = 1000


@pytest.fixture(scope="module")
def started_pd_servers(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[StockServer]]:
    """See `pd_servers`; a test may have killed some.

    An idle server with NIXL takes all of a core, so they live no longer than this module.
    """
    folder = tmp_path_factory.mktemp("pairs")
    # A prompt of the longest fits into a cache, and a few requests fill it.
    flags = ["--max-model-len", "8192", "--num-gpu-blocks-override", "400", *NIXL_FLAGS]
    servers = [
        StockServer(model_of("llama"), folder, *flags, variables=nixl_variables()) for _ in range(3)
    ]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def pd_servers(started_pd_servers: list[StockServer]) -> list[StockServer]:
    """Three stock servers that may form pairs; the first one prefills."""
    for server in started_pd_servers:
        if server.process.poll() is not None:
            server.start()
    for server in started_pd_servers:
        server.wait_until_ready()
    first, *others = started_pd_servers
    for other in others:
        meet(first, other)
    return started_pd_servers


async def tokens_from(client: ServerClient, request: GenerateCall) -> list[int]:
    return (await answer(client, request))[0]


async def second_leg(prefill: ServerClient, request: GenerateCall) -> GenerateCall:
    """Compute the prompt at the prefill server; return the call for the decode server."""
    found = await prefill.pair_prefill(request)
    return msgspec.structs.replace(request, kv_transfer_params=found.kv_transfer_params)


async def holds_nothing(client: ServerClient) -> None:
    """Wait until a server holds no blocks for requests."""
    async with asyncio.timeout(120):
        while (await client.load()).kv_usage > 0:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def described(*servers: StockServer) -> AsyncIterator[tuple[ServerClient, ServerClient]]:
    """Clients of two servers of which they know what these are."""
    prefill, decode = (ServerClient(server.url) for server in servers)
    async with prefill, decode:
        await prefill.describe()
        await decode.describe()
        yield prefill, decode


async def test_blocks_that_no_decode_server_fetches_are_released_and_others_prompts_refused(
    pd_servers: list[StockServer],
) -> None:
    async with described(*pd_servers[:2]) as (prefill, decode):
        request = await second_leg(prefill, call(prompt_of(200, seed=7), N_NEW))
        assert (await prefill.load()).kv_usage > 0
        await decode.release_pair_prefill(request)
        await holds_nothing(prefill)
        assert await decode.healthy()
        # Before the decode server sees them.
        request = await second_leg(prefill, call(prompt_of(200, seed=8), N_NEW))
        longer = msgspec.structs.replace(request, prompt_token_ids=prompt_of(300, seed=8))
        with pytest.raises(NotServable, match="holds 200 tokens, the prompt has 300"):
            await tokens_from(decode, longer)
        assert await tokens_from(decode, request) == tokens_of(
            pd_servers[0].complete(prompt_of(200, seed=8), N_NEW)
        )


async def test_a_client_that_leaves_a_leg_frees_both_legs_blocks(
    pd_servers: list[StockServer],
) -> None:
    async with described(*pd_servers[:2]) as (prefill, decode):
        request = await second_leg(prefill, call(prompt_of(500, seed=9), 2000))
        stream = decode.generate(request)
        await anext(stream)
        await stream.aclose()
        await holds_nothing(prefill)
        await holds_nothing(decode)
        first_leg = asyncio.create_task(prefill.pair_prefill(call(prompt_of(7000, seed=9), N_NEW)))
        async with asyncio.timeout(60):
            while not (await prefill.load()).n_running and not first_leg.done():
                pass
        first_leg.cancel()
        await holds_nothing(prefill)


def test_a_route_over_pairs_survives_a_decode_server_killed_in_mid_stream(
    pd_servers: list[StockServer], tmp_path: Path
) -> None:
    first, *others = pd_servers
    flags = [word for server in others for word in ("--decode", server.url)]
    # Three servers with NIXL poll on all cores: one that lives may answer late. A killed one is
    # noticed by its connection.
    flags += ["-o", "servers.answer-s=60"]
    route = Route(tmp_path, "--prefill", first.url, *flags)

    def n_fetched() -> float:
        return sum(each.metric("vllm:nixl_xfer_time_seconds_count") for each in others)

    before = n_fetched()
    try:
        halves = {"server-0-prefill", "server-1-decode", "server-2-decode"}
        route.until(lambda: halves <= route.live())
        for n in (5, 200):
            prompt = prompt_of(n, seed=n)
            expected = tokens_of(first.complete(prompt, N_NEW))
            assert tokens_of(complete(route.url, prompt, N_NEW)) == expected
        assert n_fetched() >= before + 2, "the KV was computed again"
        # One token needs no decode server, and the prefill server's blocks are released.
        assert len(tokens_of(complete(route.url, prompt_of(100, seed=12), 1))) == 1
        route.until(lambda: first.metric("vllm:kv_cache_usage_perc") == 0)
        prompt = prompt_of(200, seed=10)
        expected = tokens_of(first.complete(prompt, N_LONG))
        tokens: list[int] = []
        killed: StockServer | None = None
        for part in streamed(route.url, prompt, N_LONG):
            tokens += part
            if killed is None and len(tokens) >= 20:
                killed = pd_servers[route.last_server()]
                killed.kill()
        assert killed in others
        assert tokens == expected
        assert tokens_of(complete(route.url, prompt, N_NEW)) == expected[:N_NEW]
    finally:
        route.stop()


async def test_a_prefill_server_killed_between_the_legs_costs_another_prefill(
    pd_servers: list[StockServer],
) -> None:
    async with described(*pd_servers[:2]) as (prefill, decode):
        prompt = prompt_of(200, seed=11)
        expected = tokens_of(pd_servers[0].complete(prompt, N_NEW))
        request = await second_leg(prefill, call(prompt, N_NEW))
        pd_servers[0].kill()
        with pytest.raises(ServerRefused, match="500") as caught:
            await tokens_from(decode, request)
        assert caught.value.retryable
        plain = msgspec.structs.replace(request, kv_transfer_params=None)
        assert await tokens_from(decode, plain) == expected
        with pytest.raises(ServerGone):
            await tokens_from(prefill, plain)
