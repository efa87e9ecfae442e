"""Prompts that a decode worker prefills by itself, between two steps of its batch."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    CachedPrefix,
    Cancel,
    DecodeFailed,
    DecodeReserved,
    KvstoreAddress,
    PrefillDone,
    PrefillFailed,
    StageAddress,
    TokensProduced,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling
from halfmoon_scheduling.prefill.part_pacing import PartPacing
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from tests.services.asking import (
    GREEDY,
    LAYOUT,
    ORACLE,
    SEEDED,
    GatedEngine,
    address_of,
    chain_of,
    dial,
    prompt_of,
    reserve,
    start_decode,
    start_prefill,
)

LocalCluster = Callable[..., Any]
MINE = RequestId("mine")
#: Prefixes are read from kvstores: `test_kept_pages` has those that are in the worker's pages.
LOCAL = {"local_prefill_tokens": 256, "keep_pages": False}


def n_prefilled(cluster: Any, worker: str) -> int:
    """Prompts that a worker has prefilled."""
    prefills = cluster.worker(worker)
    shell = prefills.shell if worker.startswith("prefill") else prefills.local_prefills.shell
    return int(shell.counts._ended["done"])


# -- what it is for ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_a_short_prompt_is_prefilled_where_it_is_decoded(
    local_cluster: LocalCluster, sampling: Sampling
) -> None:
    async with local_cluster(GatedEngine, decode_settings=LOCAL) as cluster:
        assert await cluster.generate(prompt_of(50), 1) == ORACLE.expected(prompt_of(50), 1)
        passes = cluster.members["decode-0"].engine.passes
        assert passes == [[50]], "one new token needs no step"
        prompt = prompt_of(200, salt=1)
        tokens = await cluster.generate(prompt, 20, sampling=sampling)
        assert tokens == ORACLE.expected(prompt, 20, sampling=sampling)
        assert passes[1] == [200], "without a batch it is one part"
        assert (n_prefilled(cluster, "prefill-0"), n_prefilled(cluster, "decode-0")) == (0, 2)
        await cluster.settled()


async def test_its_blocks_are_kept_and_a_cached_prefix_is_read_into_the_landing(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(decode_settings=LOCAL) as cluster:
        long = prompt_of(1000)
        assert await cluster.generate(long, 5) == ORACLE.expected(long, 5)
        assert n_prefilled(cluster, "decode-0") == 0, "it is over local_prefill_tokens"
        await cluster.settled()
        longer = [*long, *prompt_of(100, salt=1)]
        assert await cluster.generate(longer, 20) == ORACLE.expected(longer, 20)
        assert n_prefilled(cluster, "decode-0") == 1, "992 of its 1,100 tokens are cached"
        await cluster.settled()
        # What the decode worker computed is in the pool as well: 68 whole blocks of 16.
        assert await cluster.n_cached(longer) == 1088
        await cluster.settled()


async def test_scores_of_the_prompt_and_of_the_first_token_are_sent(
    local_cluster: LocalCluster,
) -> None:
    scored = Sampling(temperature=0.0, logprobs=2, prompt_logprobs=1)
    async with local_cluster(decode_settings=LOCAL) as cluster:
        prompt = prompt_of(100)
        events = [event async for event in cluster.events(prompt, 4, sampling=scored)]
        assert n_prefilled(cluster, "decode-0") == 1
        assert [event.token for event in events] == ORACLE.expected(prompt, 4)
        assert all(event.score is not None for event in events)
        assert len(events[0].prompt_scores) == 99
        await cluster.settled()


# -- beside the batch ----------------------------------------------------------------------------


async def test_the_parts_of_a_prompt_leave_room_for_a_step_of_the_batch(
    local_cluster: LocalCluster,
) -> None:
    # A step is predicted to take 11 ms and more, so 5 ms leave room for the least part: a block.
    settings = {**LOCAL, "local_prefill_step_s": 0.005}
    async with local_cluster(GatedEngine, decode_settings=settings) as cluster:
        engine = cluster.members["decode-0"].engine
        stream = cluster.events(prompt_of(20), 2000)
        first = [await anext(stream) for _ in range(3)]
        engine.passes.clear()
        prompt = prompt_of(200, salt=3)
        assert await cluster.generate(prompt, 10) == ORACLE.expected(prompt, 10)
        parts = [i for i, lengths in enumerate(engine.passes) if max(lengths) > 1]
        assert [engine.passes[i] for i in parts] == [[16]] * 12 + [[8]]
        steps = {i for i, lengths in enumerate(engine.passes) if max(lengths) == 1}
        assert all(i + 1 in steps for i in parts), "a step follows each part"
        expected = ORACLE.expected(prompt_of(20), 2000)
        rest = [event.token async for event in stream]
        assert [event.token for event in first] + rest == expected
        await cluster.settled()


async def test_no_part_is_computed_before_steps_made_up_for_the_one_before(
    local_cluster: LocalCluster,
) -> None:
    spaced = {**LOCAL, "local_prefill_step_s": 0.005}
    async with local_cluster(GatedEngine, decode_settings=spaced) as cluster:
        engine = cluster.members["decode-0"].engine
        # A limit that no step keeps: the part that was computed is never made up for beside the
        # batch. A conductor that knew it would prefill elsewhere.
        cluster.worker("decode-0").local_prefills.pacing = PartPacing(1e-9)
        stream = cluster.events(prompt_of(20), 500)
        first = [await anext(stream) for _ in range(3)]
        # The batch runs on when the prompt is there, however late that is.
        engine.step_gate.clear()
        prompt = prompt_of(200, salt=3)
        answer = asyncio.create_task(cluster.generate(prompt, 10))
        await cluster.until(lambda: cluster.worker("decode-0").local_prefills.held_pages)
        engine.passes.clear()
        engine.step_gate.set()
        assert await answer == ORACLE.expected(prompt, 10)
        rest = [event.token async for event in stream]
        assert [event.token for event in first] + rest == ORACLE.expected(prompt_of(20), 500)
        parts = [i for i, lengths in enumerate(engine.passes) if max(lengths) > 1]
        assert engine.passes[parts[0]] == [16]
        steps_after = [lengths for lengths in engine.passes[parts[1] :] if max(lengths) == 1]
        assert len(steps_after) == 9, "the second one when no request but its own is running"
        await cluster.settled()


async def test_pages_stay_until_their_blocks_are_kept_even_if_the_request_is_over(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another request's KV would be stored under this prompt's hashes."""
    async with local_cluster(decode_settings=LOCAL) as cluster:
        worker = cluster.worker("decode-0")
        caching, gate = worker.local_prefills.shell._caching, asyncio.Event()
        keep = caching.keep

        async def late(job: Any) -> None:
            await gate.wait()
            await keep(job)

        monkeypatch.setattr(caching, "keep", late)
        prompt = prompt_of(100)
        assert await cluster.generate(prompt, 3) == ORACLE.expected(prompt, 3)
        await cluster.until(lambda: not worker.batch.request_ids())
        assert worker.pages.n_pages - worker.pages.n_free == 7
        # A request that gets other pages meanwhile changes nothing.
        assert await cluster.generate(prompt_of(90, salt=5), 3)
        worker.check()
        gate.set()
        await cluster.settled()
        assert await cluster.n_cached(prompt) == 96
        assert await cluster.generate(prompt, 9) == ORACLE.expected(prompt, 9)


async def test_pages_whose_blocks_are_not_kept_yet_give_way_to_a_new_request(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_cluster(n_pages=12, decode_settings=LOCAL) as cluster:
        worker = cluster.worker("decode-0")
        shell, keeping = worker.local_prefills.shell, asyncio.Event()

        async def never(job: Any) -> None:
            keeping.set()
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(shell._caching, "keep", never)
        prompt, other = prompt_of(100), prompt_of(100, salt=5)  # 7 pages each
        assert await cluster.generate(prompt, 3) == ORACLE.expected(prompt, 3)
        await cluster.until(lambda: keeping.is_set() and not worker.batch.request_ids())
        assert (worker.pages.n_free, worker.local_prefills.reclaimable_pages) == (5, 7)
        assert await cluster.generate(other, 3) == ORACLE.expected(other, 3)
        await cluster.until(lambda: worker.pages.n_free == 5)
        assert shell.counts._ended == {"done": 2, "failed": 0, "stopped": 0}
        worker.local_prefills.give_way()
        await cluster.settled()


# -- what may go wrong ---------------------------------------------------------------------------


async def test_a_client_that_leaves_in_the_middle_frees_everything(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(GatedEngine, decode_settings=LOCAL) as cluster:
        worker, engine = cluster.worker("decode-0"), cluster.members["decode-0"].engine
        engine.prompt_gate.clear()
        task = asyncio.create_task(cluster.generate(prompt_of(200), 20))
        await cluster.until(engine.in_prompt.is_set)
        task.cancel()
        await asyncio.wait([task])
        await cluster.until(lambda: not worker.batch.request_ids())
        assert worker.pages.n_free < worker.pages.n_pages, "a pass still writes to its pages"
        engine.prompt_gate.set()
        await cluster.settled()
        assert await cluster.generate(prompt_of(200), 5) == ORACLE.expected(prompt_of(200), 5)


async def test_a_pass_that_fails_is_tried_again_and_the_batch_goes_on(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(GatedEngine, decode_settings=LOCAL) as cluster:
        stream = cluster.events(prompt_of(20), 300)
        first = [(await anext(stream)).token for _ in range(3)]
        cluster.members["decode-0"].engine.n_failing = 1
        prompt = prompt_of(200, salt=2)
        assert await cluster.generate(prompt, 9) == ORACLE.expected(prompt, 9)
        rest = [event.token async for event in stream]
        assert [*first, *rest] == ORACLE.expected(prompt_of(20), 300)
        assert cluster.members["decode-0"].engine.n_failing == 0
        await cluster.settled()


async def test_a_decode_worker_killed_in_the_middle_costs_no_token(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(GatedEngine, n_decode=2, decode_settings=LOCAL) as cluster:
        engines = {name: cluster.members[name].engine for name in ("decode-0", "decode-1")}
        for engine in engines.values():
            engine.prompt_gate.clear()
        task = asyncio.create_task(cluster.generate(prompt_of(200), 30, sampling=SEEDED))
        await cluster.until(lambda: any(engine.in_prompt.is_set() for engine in engines.values()))
        name = next(name for name, engine in engines.items() if engine.in_prompt.is_set())
        for engine in engines.values():
            engine.prompt_gate.set()
        await cluster.kill(name)
        assert await task == ORACLE.expected(prompt_of(200), 30, sampling=SEEDED)
        await cluster.settled(stores=False)


async def test_a_kvstore_killed_in_mid_fetch_costs_its_cache_and_nothing_else(
    local_cluster: LocalCluster,
) -> None:
    faults = FaultInjection("memory", FaultPlan())
    settings = {**LOCAL, "kvstore_read_s": 0.5}
    async with local_cluster(backends=(faults,), decode_settings=settings) as cluster:
        long = prompt_of(1000)
        await cluster.generate(long, 3)
        await cluster.settled()
        faults.plan = FaultPlan(delay_s=0.3)
        worker = cluster.worker("decode-0")
        longer = [*long, *prompt_of(100, salt=1)]
        task = asyncio.create_task(cluster.generate(longer, 9))
        await cluster.until(lambda: any(j.lease for j in worker.local_prefills.shell.jobs.values()))
        await cluster.kill("kvstore-0")
        faults.plan = FaultPlan()
        assert await task == ORACLE.expected(longer, 9)
        await cluster.settled(stores=False)


async def test_a_drain_waits_for_a_prompt_in_its_landing(local_cluster: LocalCluster) -> None:
    async with local_cluster(GatedEngine, decode_settings=LOCAL) as cluster:
        worker, engine = cluster.worker("decode-0"), cluster.members["decode-0"].engine
        engine.prompt_gate.clear()
        task = asyncio.create_task(cluster.generate(prompt_of(200), 9))
        await cluster.until(engine.in_prompt.is_set)
        leaving = msgspec.structs.replace(worker.info, draining=True)
        drain = asyncio.create_task(worker.drain(leaving, 30.0))
        engine.prompt_gate.set()
        assert await task == ORACLE.expected(prompt_of(200), 9)
        await drain
        assert not worker.local_prefills.shell.jobs and not worker.batch.request_ids()


# -- what callers may say ------------------------------------------------------------------------


class Scene:
    """A cluster, and a caller that reserves and starts by itself."""

    def __init__(self, cluster: Any, caller: WorkerCaller) -> None:
        self.cluster, self.caller = cluster, caller
        self.worker = cluster.worker("decode-0")
        self.engine = cluster.members["decode-0"].engine

    async def reserve(self, n_tokens: int = 40, n: int = 1) -> DecodeReserved:
        await self.caller.send(reserve(MINE, n_tokens))
        landed = await self.caller.wait_for(DecodeReserved, n)
        assert isinstance(landed[-1], DecodeReserved)
        return landed[-1]

    async def start(self, landing: Landing, n_tokens: int = 40, **more: Any) -> None:
        await self.caller.send(start_prefill(MINE, prompt_of(n_tokens), landing, **more))

    async def held_up(self) -> DecodeReserved:
        """A landing whose prefill stands still in a pass."""
        landed = await self.reserve()
        self.engine.prompt_gate.clear()
        await self.start(landed.landing)
        await self.cluster.until(self.engine.in_prompt.is_set)
        return landed


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    @asynccontextmanager
    async def open_scene(**settings: Any) -> Any:
        async with local_cluster(GatedEngine, decode_settings=LOCAL | settings) as cluster:
            caller = await dial(cluster, "decode-0")
            yield Scene(cluster, caller)
            cluster.members["decode-0"].engine.prompt_gate.set()
            await caller.send(Cancel(request_id=MINE))
            await cluster.settled()
            await caller.close()

    return open_scene


async def test_it_answers_as_a_prefill_worker_does_and_goes_on_after_its_start(scene: Any) -> None:
    async with scene() as at:
        assert at.worker.info.local_prefill_tokens == 256
        assert at.worker.info.prefill_cost is not None
        landed = await at.reserve()
        for _ in range(2):
            await at.start(landed.landing)
        (done,) = await at.caller.wait_for(PrefillDone)
        first, *rest = ORACLE.expected(prompt_of(40), 8)
        assert (done.first_token, done.finish, done.n_cached) == (first, "", 0)
        await at.caller.send(start_decode(MINE, first, 40))
        tokens = await at.caller.wait_for(TokensProduced, 7)
        assert [p.token for t in tokens for p in t.produced] == rest


def wrong_starts() -> list[Any]:
    store = KvstoreAddress(WorkerId("kvstore-0"), 1, "memory://kvstore-0/commands")
    stage = StageAddress(WorkerId("prefill-1"), 1, "memory://prefill-1/commands")
    return [
        ({"token_ids": (1, 997), "n_prompt": 1}, "token 997, the vocabulary has 997", False),
        ({"n_prompt": 401}, "n_prompt is 401, token_ids has 400", False),
        ({"stages": (stage,)}, "stages names 1 workers", False),
        ({"token_ids": (1,) * 390, "n_prompt": 1}, "390 tokens, 400 were reserved", False),
        ({}, "400 tokens are not cached, local_prefill_tokens is 256", True),
        ({"cached": CachedPrefix(store, 8)}, "272 tokens are not cached", True),
    ]


async def test_a_start_that_does_not_fit_is_refused_by_name(scene: Any) -> None:
    async with scene() as at:
        landed = await at.reserve(400)
        for n, (wrong, named, retryable) in enumerate(wrong_starts()):
            await at.start(landed.landing, 400, **wrong)
            *_, failed = await at.caller.wait_for(PrefillFailed, n + 1)
            assert named in failed.reason and failed.retryable == retryable
            assert at.worker.batch.request_ids() == [MINE], "its landing waits for the cancellation"


async def test_a_start_without_a_landing_of_its_own_is_refused(scene: Any) -> None:
    async with scene() as at:
        await at.start(Landing(at.worker.region, (0, 1, 2), LAYOUT))
        (failed,) = await at.caller.wait_for(PrefillFailed)
        assert "no landing is held" in failed.reason and failed.retryable
        landing = (await at.reserve()).landing
        stranger = await dial(at.cluster, "decode-0")
        await stranger.send(start_prefill(MINE, prompt_of(40), landing))
        (failed,) = await stranger.wait_for(PrefillFailed)
        assert "no landing is held" in failed.reason
        await stranger.close()
        region = Region("prefill-0", 1, bytes(16), landing.region.length)
        pages = tuple(page + 1 for page in landing.pages)
        for n, other in enumerate(
            (Landing(landing.region, pages, LAYOUT), Landing(region, landing.pages, LAYOUT))
        ):
            await at.start(other)
            *_, failed = await at.caller.wait_for(PrefillFailed, n + 2)
            assert "landing is not the one" in failed.reason and not failed.retryable


async def test_a_request_is_not_decoded_before_it_is_prefilled(scene: Any) -> None:
    async with scene() as at:
        await at.held_up()
        await at.caller.send(start_decode(MINE, 5, 40))
        (failed,) = await at.caller.wait_for(DecodeFailed)
        assert "prefill here is not done" in failed.reason and not failed.retryable


async def test_an_id_that_is_used_again_at_once_never_meets_its_predecessors_pages(
    scene: Any,
) -> None:
    async with scene() as at:
        landed = await at.held_up()
        await at.caller.send(Cancel(request_id=MINE))
        again = await at.reserve(40, 2)
        assert not {*again.landing.pages} & {*landed.landing.pages}
        await at.start(again.landing)
        (failed,) = await at.caller.wait_for(PrefillFailed)
        assert "still ending" in failed.reason and failed.retryable


async def test_a_landing_that_runs_out_in_mid_prefill_ends_it(scene: Any) -> None:
    async with scene(landing_ttl_s=0.5) as at:
        await at.held_up()
        (failed,) = await at.caller.wait_for(DecodeFailed)
        assert "before the deadline" in failed.reason
        assert at.worker.pages.n_free < at.worker.pages.n_pages, "a pass still writes there"


async def test_a_connection_that_is_lost_in_mid_prefill_ends_it(scene: Any) -> None:
    async with scene() as at:
        other = await dial(at.cluster, "decode-0")
        at.caller, first = other, at.caller
        await at.held_up()
        await other.close()
        at.engine.prompt_gate.set()
        await at.cluster.until(lambda: not at.worker.batch.request_ids())
        at.caller = first


async def test_blocks_under_wrong_hashes_are_never_read_for_a_prompt(scene: Any) -> None:
    """A kvstore has none of the blocks that a start says are cached: all is computed."""
    async with scene() as at:
        landed = await at.reserve()
        cached = CachedPrefix(address_of(at.cluster), 2)
        await at.start(landed.landing, block_hashes=chain_of(prompt_of(40)), cached=cached)
        (done,) = await at.caller.wait_for(PrefillDone)
        assert (done.n_cached, done.first_token) == (0, ORACLE.expected(prompt_of(40), 1)[0])
