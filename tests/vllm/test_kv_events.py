"""What stock vLLM says of its cache reaches our index, and its encoder is what we decode."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_servers.client.generate_call import GenerateCall, ServerUsage
from halfmoon_servers.client.server_client import ServerClient
from halfmoon_servers.client.server_errors import ServerRefused
from halfmoon_servers.kv_events.block_translator import BlockTranslator
from halfmoon_servers.kv_events.event_source import KvEventSource
from halfmoon_servers.kv_events.followed_cache import follow_cache
from halfmoon_servers.kv_events.server_salts import ServerSalts
from tests.vllm.conftest import prompt_of
from tests.vllm.stock_server import StockServer

BLOCK = 32
PROMPT = prompt_of(4 * BLOCK + 5, seed=41)


@pytest.fixture(scope="module")
def server(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StockServer]:
    """A stock server whose cache is full after a few requests."""
    flags = ["--max-model-len", "8192", "--num-gpu-blocks-override", "400"]
    server = StockServer(model_of("llama"), tmp_path_factory.mktemp("events"), *flags)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


class Follower:
    """A cache as it is told, and what it holds by these changes."""

    def __init__(self, changes: Any) -> None:
        self._changes = changes
        self.held: set[bytes] = set()

    async def until(self, holds: Callable[[set[bytes]], bool]) -> None:
        async with asyncio.timeout(120):
            while not holds(self.held):
                self.apply(await anext(self._changes))

    def apply(self, changes: Sequence[KvEvent]) -> None:
        for change in changes:
            match change:
                case AllBlocksCleared():
                    self.held.clear()
                case BlockStored(block_hashes=hashes):
                    self.held |= {each for each in hashes if isinstance(each, bytes)}
                case BlockRemoved(block_hashes=hashes):
                    self.held -= {each for each in hashes if isinstance(each, bytes)}


def call(prompt: Sequence[int], n: int = 4, **fields: Any) -> GenerateCall:
    return GenerateCall(
        request_id=f"events-{len(prompt)}",
        model="tiny",
        prompt_token_ids=prompt,
        sampling=fields.pop("sampling", Sampling(temperature=0)),
        stopping=Stopping(max_new_tokens=n),
        **fields,
    )


async def answer(client: ServerClient, request: GenerateCall) -> tuple[list[int], ServerUsage]:
    tokens: list[int] = []
    usage = None
    async for piece in client.generate(request):
        tokens += piece.token_ids
        usage = piece.usage or usage
    assert usage is not None
    return tokens, usage


async def test_a_servers_cache_is_known_by_hashes_salts_and_removals(server: StockServer) -> None:
    salts = ServerSalts()
    async with ServerClient(server.url) as client:
        seen = await client.describe()
        assert (seen.kind, seen.version, seen.block_size) == ("vllm", "0.32.0", BLOCK)
        assert seen.n_blocks and seen.max_model_len == 8192
        first, _ = await answer(client, call(PROMPT))  # before anything follows
        source = KvEventSource(seen.event_endpoints[0])
        translator = BlockTranslator("m", BLOCK, salts)
        async with aclosing(follow_cache(source, translator)) as changes:
            follower = Follower(changes)
            plain = block_hashes(PROMPT, model="m", block_size=BLOCK)
            await follower.until(lambda held: set(plain) <= held)
            again, usage = await answer(client, call(PROMPT))
            assert again == first
            assert usage == ServerUsage(len(PROMPT), 4, 4 * BLOCK)
            for salt in ("lab\x1f", "a/b@c\\d", "x" * 300):
                wire = salts.server_salt(salt)
                salted, usage = await answer(client, call(PROMPT, salt=wire))
                assert (salted, usage.n_cached) == (first, 0)
                ours = block_hashes(PROMPT, model="m", salt=salt, block_size=BLOCK)
                await follower.until(lambda held, ours=ours: set(ours) <= held)  # type: ignore[misc]
            assert set(translator.held()) == follower.held
            assert asdict(translator.counts) == dict.fromkeys(asdict(translator.counts), 0)
            for seed in range(100, 101 + seen.n_blocks // 100):  # more than the cache has room for
                await answer(client, call(prompt_of(110 * BLOCK, seed=seed), 1))
            await follower.until(lambda held: not set(plain) & held)
            assert len(follower.held) <= seen.n_blocks


async def test_a_server_says_how_busy_it_is_and_what_it_refuses(server: StockServer) -> None:
    async with ServerClient(server.url) as client:
        seen = await client.describe()
        assert await client.healthy()
        stream = client.generate(call(PROMPT, 4000))
        await anext(stream)
        async with asyncio.timeout(60):
            while (await client.load()).n_running != 1:
                pass
        await stream.aclose()  # the server stops the request
        async with asyncio.timeout(60):
            while (await client.load()).n_running:
                pass
        with pytest.raises(ServerRefused, match="400") as caught:
            await answer(client, call(prompt_of(seen.max_model_len)))
        assert caught.value.invalid


async def test_scores_biases_and_stop_tokens_mean_what_they_mean_to_us(server: StockServer) -> None:
    async with ServerClient(server.url) as client:
        await client.describe()
        pieces = [
            piece
            async for piece in client.generate(
                call(PROMPT, 3, sampling=Sampling(temperature=0, logprobs=2))
            )
        ]
        scores = [score for piece in pieces for score in piece.scores]
        tokens = [token for piece in pieces for token in piece.token_ids]
        assert [score.rank for score in scores] == [1, 1, 1]
        assert [score.top[0][0] for score in scores] == tokens
        assert all(len(score.top) == 2 for score in scores)
        bias = Sampling(temperature=0, logit_bias=((7, 100.0),))
        assert (await answer(client, call(PROMPT, 3, sampling=bias)))[0] == [7, 7, 7]
        stopping = Stopping(max_new_tokens=9, stop_token_ids=(tokens[1],))
        stopped = msgspec.structs.replace(call(PROMPT), stopping=stopping)
        pieces = [piece async for piece in client.generate(stopped)]
        seen = [token for piece in pieces for token in piece.token_ids]
        assert seen == tokens[: tokens.index(tokens[1]) + 1]
        assert [piece.finish for piece in pieces if piece.finish] == ["stop"]
        seeded = Sampling(temperature=1.0, seed=7)
        drawn = [(await answer(client, call(PROMPT, 5, sampling=seeded)))[0] for _ in range(2)]
        assert drawn[0] == drawn[1]
