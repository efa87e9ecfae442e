"""Faults around servers that share the pool: right tokens, nothing held, used again after that."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from halfmoon_protocol.blocks import block_hashes
from tests.vllm.conftest import BLOCK_SIZE, prompt_of
from tests.vllm.connector_fleet import Fleet, cached_tokens, wait_until


def until_nothing_is_held(fleet: Fleet, kvstore: str = "kvstore-0") -> None:
    wait_until(lambda: fleet.pool.n_held(kvstore) == 0, "no lease and no reservation is left")


async def test_a_damaged_block_is_computed_instead_and_its_kvstore_is_told(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    prompt = prompt_of(200, seed=11)
    expected = fleet.stored(first, prompt)
    layout = fleet.pool.info("kvstore-0").layout
    assert layout is not None
    hashes = block_hashes(prompt, model=layout.model, block_size=BLOCK_SIZE)
    async with fleet.pool.client("kvstore-0") as client:
        await client.damage(hashes[3:4])
        assert second.tokens(prompt, 8) == expected
        assert "1 blocks of kvstore kvstore-0 are not what was stored" in second.log.read_text()
        wait_until(lambda: second.metric("vllm:halfmoon_blocks_corrupt_total") == 1, "counted")
        assert hashes[2] in await client.stored()
    wait_until(lambda: cached_tokens(first, [*prompt, 5]) > 0, "the first one serves")
    until_nothing_is_held(fleet)


def test_a_kvstore_that_hangs_or_is_killed_costs_no_request_and_is_used_again(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    hung, killed = prompt_of(300, seed=13), prompt_of(300, seed=14)
    expected = [fleet.stored(first, prompt) for prompt in (hung, killed)]
    fleet.pool.processes["kvstore-0"].signal(signal.SIGSTOP)
    assert second.tokens(hung, 8) == expected[0]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(second.tokens, killed, 8)
        fleet.pool.kill("kvstore-0")
        assert answer.result() == expected[1]
    fleet.pool.start_kvstore("kvstore-0")
    again = prompt_of(300, seed=15)
    wait_until(
        lambda: fleet.pool.n_stored("kvstore-0") > 0 or not first.tokens(prompt_of(64), 1),
        "the new one is in use",
    )
    fleet.stored(first, again)
    assert cached_tokens(second, again) == 256
    until_nothing_is_held(fleet)


def test_servers_share_blocks_while_redis_is_away(fleet: Fleet) -> None:
    first, second = fleet.servers[:2]
    fleet.pool.redis.kill()
    try:
        prompt = prompt_of(200, seed=16)
        expected = fleet.stored(first, prompt)
        assert cached_tokens(second, prompt) == 192
        assert second.tokens(prompt, 8) == expected
    finally:
        fleet.pool.redis.start()
    after = prompt_of(200, seed=17)
    fleet.stored(first, after)
    assert cached_tokens(second, after) == 192


def test_a_killed_server_leaves_nothing_and_one_started_without_redis_takes_its_place(
    fleet: Fleet,
) -> None:
    first, second = fleet.servers[:2]
    prompts = [prompt_of(1500, seed=20 + i) for i in range(4)]
    expected = [second.tokens(prompt, 4, cache_salt="reference") for prompt in prompts]
    before = fleet.pool.n_stored("kvstore-0")
    with ThreadPoolExecutor(len(prompts)) as threads:
        for prompt in prompts:
            threads.submit(_ignore_errors, first.tokens, prompt, 400)
        wait_until(lambda: fleet.pool.n_stored("kvstore-0") > before, "the first one stores")
        first.kill()
    until_nothing_is_held(fleet)
    assert [second.tokens(prompt, 4) for prompt in prompts] == expected

    fleet.pool.redis.kill()
    try:
        # With memory for 70 blocks in its cache, and for 21 on their way.
        third = fleet.start("--num-gpu-blocks-override", "70", staging_mib=1)
        third.wait_until_ready()
        assert third.tokens(prompts[0], 4) == expected[0]
        assert third.log.read_text().count("the metadata server is away: serving") == 1
    finally:
        fleet.pool.redis.start()
    fresh = iter(range(100, 200))

    def hits() -> bool:
        prompt = prompt_of(200, seed=next(fresh))
        before = fleet.pool.n_stored("kvstore-0")
        second.tokens(prompt, 1)
        wait_until(lambda: fleet.pool.n_stored("kvstore-0") >= before + 6, "stored by the second")
        return cached_tokens(third, prompt) == 192

    wait_until(hits, "the third one is connected")
    assert third.tokens(prompts[1], 4) == expected[1]
    until_nothing_is_held(fleet)


def test_many_requests_at_a_server_short_of_memory_get_the_right_tokens(fleet: Fleet) -> None:
    second, third = fleet.servers[1], fleet.servers[-1]
    prompts = [
        [*prompt_of(320, seed=30 + i % 3), *prompt_of(100 + 37 * i, seed=40 + i)] for i in range(10)
    ]
    expected = [second.tokens(prompt, 40, cache_salt="reference") for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(2):
            assert list(threads.map(lambda prompt: third.tokens(prompt, 40), prompts)) == expected
            third.reset_own_cache()
        loaded = third.metric("vllm:halfmoon_blocks_loaded_total")
        assert list(threads.map(lambda prompt: third.tokens(prompt, 40), prompts)) == expected
    assert third.metric("vllm:halfmoon_blocks_loaded_total") > loaded
    until_nothing_is_held(fleet)


def _ignore_errors(call: object, *arguments: object) -> None:
    with suppress(httpx.HTTPError):
        call(*arguments)  # type: ignore[operator]
