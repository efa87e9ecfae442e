"""A prefill/decode pair of stock vLLM servers answers as one server, and faults cost no token.

Order matters: servers are killed, and starting one takes a minute.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_servers.client.generate_call import GenerateCall
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_errors import (
    AnswerBroken,
    NotServable,
    ServerGone,
    ServerRefused,
)
from tests.vllm.conftest import prompt_of
from tests.vllm.stock_server import StockServer, tokens_of

Pair = tuple[StockServer, StockServer]
N_NEW = 24


def call(prompt: Sequence[int], n: int = N_NEW, **fields: Any) -> GenerateCall:
    return GenerateCall(
        request_id=f"pair-{len(prompt)}",
        model="tiny",
        prompt_token_ids=prompt,
        sampling=Sampling(temperature=0),
        stopping=Stopping(max_new_tokens=n),
        **fields,
    )


async def answer(client: ServerClient, request: GenerateCall) -> list[int]:
    return [token async for piece in client.generate(request) for token in piece.token_ids]


async def second_leg(prefill: ServerClient, request: GenerateCall) -> GenerateCall:
    """Compute the prompt at the prefill server; return the call for the decode server."""
    found = await prefill.pair_prefill(request)
    return msgspec.structs.replace(request, kv_transfer_params=found.kv_transfer_params)


async def holds_nothing(client: ServerClient) -> None:
    """Wait until a server holds no blocks for requests."""
    async with asyncio.timeout(120):
        while (await client.load()).kv_usage > 0:
            await asyncio.sleep(0.05)


async def described(*servers: StockServer) -> list[ServerClient]:
    clients = [ServerClient(server.url) for server in servers]
    for client in clients:
        await client.describe()
    return clients


async def test_a_pair_answers_as_one_server_and_holds_nothing_after(server_pair: Pair) -> None:
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        for n in (200, 64, 5):  # whole blocks and parts of one
            prompt = prompt_of(n, seed=n)
            expected = tokens_of(server_pair[0].complete(prompt, N_NEW))
            request = await second_leg(prefill, call(prompt))
            assert await answer(decode, request) == expected
            await holds_nothing(prefill)
            await holds_nothing(decode)


async def test_blocks_that_no_decode_server_fetches_are_released_when_one_is_told(
    server_pair: Pair,
) -> None:
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        request = await second_leg(prefill, call(prompt_of(200, seed=7)))
        assert (await prefill.load()).kv_usage > 0
        await decode.release_pair_prefill(request)
        await holds_nothing(prefill)
        assert await decode.healthy()


async def test_blocks_of_another_prompt_are_refused_before_the_decode_server_sees_them(
    server_pair: Pair,
) -> None:
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        request = await second_leg(prefill, call(prompt_of(200, seed=8)))
        longer = msgspec.structs.replace(request, prompt_token_ids=prompt_of(300, seed=8))
        with pytest.raises(NotServable, match="holds 200 tokens, the prompt has 300"):
            await answer(decode, longer)
        assert await answer(decode, request) == tokens_of(
            server_pair[0].complete(prompt_of(200, seed=8), N_NEW)
        )


async def test_a_client_that_leaves_either_leg_frees_the_blocks_of_both(server_pair: Pair) -> None:
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        request = await second_leg(prefill, call(prompt_of(500, seed=9), 2000))
        stream = decode.generate(request)
        await anext(stream)
        await stream.aclose()
        await holds_nothing(prefill)
        await holds_nothing(decode)
        first_leg = asyncio.create_task(prefill.pair_prefill(call(prompt_of(7000, seed=9))))
        async with asyncio.timeout(60):
            while not (await prefill.load()).n_running and not first_leg.done():
                pass
        first_leg.cancel()
        await holds_nothing(prefill)


async def test_a_decode_server_killed_in_mid_stream_costs_no_token(server_pair: Pair) -> None:
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        prompt = prompt_of(200, seed=10)
        expected = tokens_of(server_pair[0].complete(prompt, 300))
        request = await second_leg(prefill, call(prompt, 300))
        tokens: list[int] = []
        with pytest.raises(AnswerBroken):
            async for piece in decode.generate(request):
                tokens += piece.token_ids
                if len(tokens) == 5:
                    server_pair[1].kill()
        assert tokens == expected[: len(tokens)]
        rest = call([*prompt, *tokens], 300 - len(tokens))
        tokens += await answer(prefill, rest)
        assert tokens == expected
        with pytest.raises(ServerGone):
            await answer(decode, call(prompt))


async def test_a_prefill_server_killed_between_the_legs_costs_another_prefill(
    server_pair: Pair,
) -> None:
    server_pair[1].start()
    server_pair[1].wait_until_ready()
    prefill, decode = await described(*server_pair)
    async with prefill, decode:
        prompt = prompt_of(200, seed=11)
        expected = tokens_of(server_pair[0].complete(prompt, N_NEW))
        # The restarted decode server forms a pair with the same prefill server again.
        assert await answer(decode, await second_leg(prefill, call(prompt))) == expected
        request = await second_leg(prefill, call(prompt_of(200, seed=12)))
        server_pair[0].kill()
        with pytest.raises(ServerRefused, match="500") as caught:
            await answer(decode, request)
        assert caught.value.retryable
        plain = msgspec.structs.replace(request, kv_transfer_params=None)
        again = await answer(decode, plain)
        assert again == tokens_of(server_pair[1].complete(prompt_of(200, seed=12), N_NEW))
        assert await answer(decode, call(prompt)) == expected
