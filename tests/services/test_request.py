"""One request's way through the services, on the engine whose tokens depend on every KV byte."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from halfmoon_conductor.errors import (
    ApiError,
    ContextLengthExceeded,
    ServerOverloaded,
    ServiceUnavailable,
)
from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import Cancel, PrefillStopped
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.config import SchedulingConfig
from tests.services.asking import (
    GREEDY,
    ORACLE,
    SEEDED,
    SLOW,
    GatedEngine,
    prompt_of,
    start_prefill,
)

LocalCluster = Callable[..., Any]


async def test_tokens_are_the_oracles_cold_and_cached(local_cluster: LocalCluster) -> None:
    async with local_cluster() as cluster:
        for n_tokens in (1, 15, 16, 17, 100, 1000):
            prompt = prompt_of(n_tokens, salt=n_tokens)
            for sampling in (GREEDY, GREEDY, SEEDED):  # drawn over the history
                expected = ORACLE.expected(prompt, 40, sampling=sampling)
                assert await cluster.generate(prompt, 40, sampling=sampling) == expected
            events = [event async for event in cluster.events(prompt, 1)]
            first = ORACLE.expected(prompt, 1)[0]
            assert [(e.token, e.finish) for e in events] == [(first, "length")]
        await cluster.settled()


async def test_a_prompt_alone_is_computed_in_long_chunks(local_cluster: LocalCluster) -> None:
    settings = {"max_chunk_tokens": 256}
    async with local_cluster(GatedEngine, chunk_tokens=32, prefill_settings=settings) as cluster:
        prompt = prompt_of(600)
        assert await cluster.generate(prompt, 3) == ORACLE.expected(prompt, 3)
        assert cluster.worker("prefill-0").forward.engine.passes == [[256], [256], [88]]


async def test_a_second_request_reuses_whole_blocks_and_computes_at_least_one_token(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        assert await cluster.n_cached(prompt_of(64)) == 0
        await cluster.settled()
        assert await cluster.n_cached(prompt_of(64)) == 48
        assert await cluster.n_cached(prompt_of(70)) == 64
        assert await cluster.n_cached(prompt_of(64, salt=1)) == 0


async def test_tenants_with_different_salts_share_no_cache(local_cluster: LocalCluster) -> None:
    async with local_cluster() as cluster:
        await cluster.generate(prompt_of(64), 1, salt="a")
        await cluster.settled()
        events = [e async for e in cluster.events(prompt_of(64), 1, salt="b")]
        assert events[0].n_cached == 0
        events = [e async for e in cluster.events(prompt_of(64), 1, salt="a")]
        assert events[0].n_cached == 48


async def test_a_tenants_blocks_count_at_the_kvstore_and_keep_within_its_quota(
    local_cluster: LocalCluster,
) -> None:
    layout = ORACLE.layout
    mib = 6 * layout.block_bytes / (1 << 20)
    async with local_cluster(tenant_quotas_mib=f"lab={mib}") as cluster:
        store = cluster.worker("kvstore-0")
        for salt in range(3):
            prompt = prompt_of(4 * layout.block_size, salt=salt)
            assert await cluster.generate(prompt, 4, tenant="lab") == ORACLE.expected(prompt, 4)
            await cluster.settled()
        assert store.tiers.tenants.n_blocks("lab") == 6
        await cluster.generate(prompt_of(64, salt=7), 1, tenant="shop")
        await cluster.settled()
        assert store.tiers.memory.n_stored > 6 and store.tiers.tenants.usage() == {"lab": 6}


@pytest.mark.parametrize(("chunk_tokens", "local"), [(1, 0), (7, 0), (512, 0), (512, 256)])
async def test_sixteen_requests_at_once_in_two_by_two(
    local_cluster: LocalCluster, chunk_tokens: int, local: int
) -> None:
    prompts = [prompt_of(1 + 23 * i, salt=i % 3) for i in range(16)]
    shape = {"n_prefill": 2, "n_decode": 2, "n_kvstore": 2, "chunk_tokens": chunk_tokens}
    async with local_cluster(decode_settings={"local_prefill_tokens": local}, **shape) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, 30) for p in prompts))
        assert answers == [ORACLE.expected(p, 30) for p in prompts]
        await cluster.settled()


async def test_a_request_works_without_any_kvstore(local_cluster: LocalCluster) -> None:
    async with local_cluster(n_kvstore=0) as cluster:
        for _ in range(2):
            assert await cluster.generate(prompt_of(80), 5) == ORACLE.expected(prompt_of(80), 5)
        await cluster.settled()


async def test_a_stop_token_ends_the_request(local_cluster: LocalCluster) -> None:
    prompt = prompt_of(20)
    expected = ORACLE.expected(prompt, 20)
    stop = expected[7]
    cut = expected[: expected.index(stop) + 1]
    async with local_cluster() as cluster:
        events = [
            event
            async for event in cluster.events(
                prompt, 20, stopping=Stopping(max_new_tokens=20, stop_token_ids=(stop,))
            )
        ]
        assert [event.token for event in events] == cut
        assert events[-1].finish == "stop"
        await cluster.settled()


async def test_stop_tokens_are_not_drawn_before_min_new_tokens(
    local_cluster: LocalCluster,
) -> None:
    """Neither by prefill, which chooses the first token, nor by decode, nor by a later try."""
    prompt = prompt_of(20)
    async with local_cluster(lambda: FakeEngine(SLOW), n_decode=2) as cluster:
        for n_min in (1, 4, 40):
            stopping = stopping_at(prompt, n_min)
            wanted = ORACLE.expected(prompt, n_min + 1, stopping=stopping)
            events = []
            async for event in cluster.events(prompt, 60, stopping=stopping):
                events.append(event)
                if (n_min, len(events)) == (40, 5):
                    await cluster.kill(running_decode(cluster))
            assert [event.token for event in events] == wanted
            assert [event.finish for event in events] == [""] * n_min + ["stop"]


def running_decode(cluster: Any) -> str:
    """The decode worker that has a request."""
    return next(
        str(name)
        for name, member in cluster.members.items()
        if name.startswith("decode") and member.worker.batch.n_running
    )


def stopping_at(prompt: list[int], n_min: int) -> Stopping:
    """Stop tokens that would come first, and one that comes as soon as stop tokens may."""
    early = ORACLE.expected(prompt, 2)
    masking = Stopping(max_new_tokens=60, stop_token_ids=(*early, 2**31), min_new_tokens=n_min)
    last = ORACLE.expected(prompt, n_min + 1, stopping=masking)[-1]
    return msgspec.structs.replace(masking, stop_token_ids=(*masking.stop_token_ids, last))


async def test_a_full_pool_preempts_and_every_token_still_comes(
    local_cluster: LocalCluster,
) -> None:
    """Twelve pages for four requests that grow to four pages each."""
    prompts = [prompt_of(20, salt=i) for i in range(4)]
    async with local_cluster(lambda: FakeEngine(SLOW), n_pages=12) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, 44) for p in prompts))
        assert answers == [ORACLE.expected(p, 44) for p in prompts]
        await cluster.settled()
        given_up = cluster.worker("decode-0").metrics()["halfmoon_decode_failures_total"][1]
        assert given_up.values["preempted",]


async def test_a_client_that_leaves_frees_everything_on_both_workers(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(lambda: FakeEngine(SLOW)) as cluster:
        stream = cluster.events(prompt_of(100), 1000)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        await cluster.settled()
        assert not sum(cluster.core.n_requests.values())


async def test_a_client_that_leaves_during_prefill_stops_it(local_cluster: LocalCluster) -> None:
    slow = FakeModelSpec(step_s=0.02)
    async with local_cluster(lambda: FakeEngine(slow), chunk_tokens=16) as cluster:
        stream = cluster.events(prompt_of(2000), 10)
        task = asyncio.create_task(anext(stream))
        await cluster.until(lambda: bool(cluster.worker("prefill-0").jobs))
        task.cancel()
        await asyncio.wait([task])
        await cluster.settled()
        assert not sum(cluster.core.n_requests.values())
        ended = cluster.worker("prefill-0").metrics()["halfmoon_prefill_requests_ended_total"][1]
        assert ended.values == {("done",): 0, ("failed",): 0, ("stopped",): 1}


async def test_a_cancel_right_behind_its_start_and_said_twice_frees_everything(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        prefill, decode = cluster.worker("prefill-0"), cluster.worker("decode-0")
        link = await cluster.network.dial(prefill.port.commands)
        landing = Landing(decode.region, tuple(range(7)), decode.engine.layout)
        start = start_prefill("r", prompt_of(100), landing)
        for message in (start, *[Cancel(request_id=RequestId("r"))] * 3):
            await link.send(message)
        assert await link.receive() == PrefillStopped(request_id=RequestId("r"))
        await cluster.settled()


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["prefill", "decode"])
async def test_a_missing_role_is_unavailable(local_cluster: LocalCluster, missing: str) -> None:
    async with local_cluster(**{f"n_{missing}": 0}) as cluster:
        with pytest.raises(ServiceUnavailable, match=missing):
            await cluster.generate([1, 2], 2)


async def test_a_prompt_that_no_decode_worker_can_hold_names_the_limit(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_pages=8) as cluster:
        with pytest.raises(ContextLengthExceeded, match="8"):
            await cluster.generate(prompt_of(120), 16)
        await cluster.settled()


async def test_a_predicted_slo_miss_is_refused_and_nothing_is_spent(
    local_cluster: LocalCluster,
) -> None:
    config = SchedulingConfig(admission="early")
    async with local_cluster(config=config) as cluster:
        with pytest.raises(ServerOverloaded) as caught:
            await cluster.generate(prompt_of(3000), 4, ttft_slo_s=0.001)
        assert caught.value.retry_after_s and caught.value.retry_after_s > 0
        assert not cluster.worker("prefill-0").jobs
        await cluster.settled()


# -- bad luck --------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_a_worker_killed_in_mid_request_costs_no_token(
    local_cluster: LocalCluster, victim: str
) -> None:
    # Long enough to be met in the middle of its prefill, whatever else the machine does.
    prompt = prompt_of(400 if victim == "decode" else 3000)
    workers = [f"{victim}-{i}" for i in range(2)]
    async with local_cluster(
        lambda: FakeEngine(SLOW), n_prefill=2, n_decode=2, chunk_tokens=16
    ) as cluster:
        tokens: list[int] = []

        async def ask() -> None:
            async for event in cluster.events(prompt, 60, SEEDED):
                tokens.append(event.token)

        def busy() -> list[str]:
            if victim == "prefill":
                return [name for name in workers if cluster.worker(name).jobs]
            running = [name for name in workers if cluster.worker(name).batch.n_running]
            return running if len(tokens) >= 20 else []

        task = asyncio.create_task(ask())
        await cluster.until(lambda: bool(busy()))
        await cluster.kill(busy()[0])
        await task
        assert tokens == ORACLE.expected(prompt, 60, sampling=SEEDED)
        await cluster.settled(stores=False)


async def test_the_last_decode_worker_killed_ends_the_stream_in_an_error(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(lambda: FakeEngine(SLOW)) as cluster:
        got = []
        with pytest.raises(ServiceUnavailable):
            async for event in cluster.events(prompt_of(50), 200):
                got.append(event.token)
                if len(got) == 10:
                    await cluster.kill("decode-0")
        assert got == ORACLE.expected(prompt_of(50), 200)[: len(got)]


async def test_a_killed_kvstore_costs_its_cache_and_nothing_else(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        prompt = prompt_of(200)
        await cluster.generate(prompt, 3)
        await cluster.settled()
        await cluster.kill("kvstore-0")
        assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)


async def test_a_restarted_worker_of_the_same_name_is_used_again(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        await cluster.kill("decode-0")
        await cluster.until(lambda: not cluster.core.cluster.accepting("decode"))
        with pytest.raises(ApiError):
            await cluster.generate([1], 2)
        await cluster.start_decode("decode-0")
        await cluster.until(lambda: bool(cluster.core.cluster.accepting("decode")))
        assert await cluster.generate([1], 5) == ORACLE.expected([1], 5)


async def test_a_worker_of_another_layout_is_refused_with_both_values_named(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        cluster.make_engine = lambda: FakeEngine(block_size=32)
        await cluster.start_decode("decode-1")
        await cluster.until(lambda: "decode-1" in cluster.hub.refusals())
        reason = cluster.hub.refusals()["decode-1"]
        assert "block_size" in reason and "16" in reason and "32" in reason
        assert await cluster.generate([1], 5) == ORACLE.expected([1], 5)
