"""A decode worker that still has the KV of earlier turns gets the rest of a prompt only."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import BlockHash, RequestId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeRefused,
    DecodeReserved,
    PrefillFailed,
    TokensProduced,
)
from halfmoon_protocol.regions import Landing
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from tests.services.asking import (
    GREEDY,
    LAYOUT,
    ORACLE,
    SLOW,
    chain_of,
    dial,
    prompt_of,
    reserve,
    start_decode,
    start_prefill,
)

LocalCluster = Callable[..., Any]
SIZE = LAYOUT.block_size
#: What a decode worker needs to prefill all of these prompts by itself.
LOCAL = {"local_prefill_tokens": 2048}


def count(cluster: Any, worker: str, metric: str, source: str) -> int:
    return int(cluster.worker(worker).metrics()[metric][1].values[source,])


def landed(cluster: Any, worker: str = "decode-0") -> tuple[int, int]:
    """Blocks of prompts that were sent to a decode worker, and those that it had."""
    metric = "halfmoon_decode_prompt_blocks_total"
    return count(cluster, worker, metric, "sent"), count(cluster, worker, metric, "held")


def landing_bytes(cluster: Any, source: str, n_prefill: int = 1) -> int:
    metric = "halfmoon_prefill_landing_bytes_total"
    return sum(count(cluster, f"prefill-{i}", metric, source) for i in range(n_prefill))


async def turns(cluster: Any, n_turns: int) -> list[tuple[int, int, int]]:
    """Have a conversation; of each turn, blocks sent and held, and tokens that came before it."""
    said: list[int] = []
    seen: list[tuple[int, int, int]] = []
    for turn in range(n_turns):
        before = landed(cluster)
        prompt = [*said, *prompt_of(21 + 9 * turn, turn)]
        answer = await cluster.generate(prompt, 50)
        assert answer == ORACLE.expected(prompt, 50)
        sent, held = (n - was for n, was in zip(landed(cluster), before, strict=True))
        seen.append((sent, held, len(said)))
        said = [*prompt, *answer]
        await cluster.settled()
    return seen


@pytest.mark.parametrize("n_kvstore", [0, 1])
async def test_each_turn_sends_what_decode_does_not_have(
    local_cluster: LocalCluster, n_kvstore: int
) -> None:
    async with local_cluster(n_kvstore=n_kvstore) as cluster:
        n_before = 0
        for turn, (sent, held, n_said) in enumerate(await turns(cluster, 6)):
            n_blocks = LAYOUT.blocks_for(n_said + 21 + 9 * turn)
            # Without a kvstore the chain of an answer is unknown: prompts alone are kept.
            n_known = n_said - 1 if n_kvstore else n_before
            assert (sent, held) == (n_blocks - max(0, n_known) // SIZE, max(0, n_known) // SIZE)
            n_before = n_said + 21 + 9 * turn
        sent, held = landed(cluster)
        assert landing_bytes(cluster, "sent") == sent * LAYOUT.block_bytes
        assert landing_bytes(cluster, "held") == held * LAYOUT.block_bytes


async def test_turns_that_are_prefilled_at_decode_begin_behind_what_is_there(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(decode_settings=LOCAL) as cluster:
        for _, held, n_before in await turns(cluster, 6):
            assert held == max(0, n_before - 1) // SIZE
        metrics = cluster.worker("prefill-0").metrics()
        assert metrics["halfmoon_prefill_requests_ended_total"][1].values["done",] < 6


async def test_what_is_left_of_a_prefix_is_used_and_the_rest_is_read_from_the_kvstore(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_pages=24, decode_settings=LOCAL) as cluster:
        prompt = prompt_of(151, 1)
        await cluster.generate(prompt, 2)  # 9 full blocks, of 24 pages
        await cluster.settled()
        other = prompt_of(300, 2)
        assert await cluster.generate(other, 2) == ORACLE.expected(other, 2)  # 19 pages
        await cluster.settled()
        longer = [*prompt, *prompt_of(39, 3)]
        before = landed(cluster)[1]
        events = [event async for event in cluster.events(longer, 20)]
        assert [event.token for event in events] == ORACLE.expected(longer, 20)
        assert landed(cluster)[1] - before == 5
        assert events[0].n_cached == 9 * SIZE


async def test_a_prompt_s_scores_are_computed_over_pages_of_its_own(
    local_cluster: LocalCluster,
) -> None:
    prompt = prompt_of(60, 1)
    async with local_cluster(decode_settings=LOCAL) as cluster:
        for _ in range(2):
            scored = Sampling(temperature=0.0, prompt_logprobs=0)
            found = [event.token async for event in cluster.events(prompt, 20, scored)]
            assert found == ORACLE.expected(prompt, 20)
            assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
        await cluster.settled()


async def test_requests_that_run_at_once_share_the_blocks_of_their_prompts(
    local_cluster: LocalCluster,
) -> None:
    shared = prompt_of(100, 1)
    prompts = [[*shared, *prompt_of(20 + i, 2 + i)] for i in range(4)]
    async with local_cluster(lambda: FakeEngine(SLOW)) as cluster:
        first = cluster.events(prompts[0], 200)
        tokens = [(await anext(first)).token for _ in range(5)]
        others = [asyncio.create_task(cluster.generate(p, 60)) for p in prompts[1:]]
        await cluster.until(lambda: cluster.worker("decode-0").batch.n_running == 4)
        cluster.worker("decode-0").check()
        assert landed(cluster)[1] == 3 * (100 // SIZE)
        tokens += [event.token async for event in first]
        assert tokens == ORACLE.expected(prompts[0], 200)
        for prompt, other in zip(prompts[1:], others, strict=True):
            assert await other == ORACLE.expected(prompt, 60)
        await cluster.settled()


@pytest.mark.parametrize(
    "settings", [{"decode_settings": {"keep_pages": False}}, {"skips_held_blocks": False}]
)
async def test_everything_is_sent_where_a_side_does_not_say_that_it_knows_better(
    local_cluster: LocalCluster, settings: dict[str, Any]
) -> None:
    async with local_cluster(**settings) as cluster:
        assert [held for _, held, _ in await turns(cluster, 3)] == [0, 0, 0]
        assert landing_bytes(cluster, "held") == 0


async def test_another_tenant_shares_no_page(local_cluster: LocalCluster) -> None:
    prompt = prompt_of(100, 1)
    async with local_cluster() as cluster:
        for salt, n_held in (("a", 0), ("b", 0), ("a", 6)):
            before = landed(cluster)[1]
            assert await cluster.generate(prompt, 10, salt=salt) == ORACLE.expected(prompt, 10)
            assert landed(cluster)[1] - before == n_held


async def test_kept_pages_are_given_up_for_requests_that_need_them(
    local_cluster: LocalCluster,
) -> None:
    """Sixteen pages: a conversation of ten blocks, then others that need all of them."""
    async with local_cluster(n_pages=16) as cluster:
        worker = cluster.worker("decode-0")
        await turns(cluster, 2)
        assert worker.pages.kept.n_unheld and worker.batch.free_pages == 16
        for salt in range(4):
            prompt = prompt_of(150 + salt, 50 + salt)
            assert await cluster.generate(prompt, 60) == ORACLE.expected(prompt, 60)
        await cluster.settled()
        given_up = worker.metrics()["halfmoon_decode_failures_total"][1]
        assert not given_up.values["refused",] and not given_up.values["preempted",]
        for _, held, n_before in (await turns(cluster, 2))[1:]:
            assert held == (n_before - 1) // SIZE


async def test_preempted_requests_find_their_pages_or_not_and_go_on(
    local_cluster: LocalCluster,
) -> None:
    """Twelve pages for four requests that grow to four pages each, with a prefix in common."""
    prompts = [[*prompt_of(17, 9), *prompt_of(5, i)] for i in range(4)]
    async with local_cluster(lambda: FakeEngine(SLOW), n_pages=12) as cluster:
        for _ in range(2):
            answers = await asyncio.gather(*(cluster.generate(p, 44) for p in prompts))
            assert answers == [ORACLE.expected(p, 44) for p in prompts]
            await cluster.settled()
        given_up = cluster.worker("decode-0").metrics()["halfmoon_decode_failures_total"][1]
        assert given_up.values["preempted",]
        for prompt, answer in zip(prompts, answers, strict=True):
            longer = [*prompt, *answer]
            assert await cluster.generate(longer, 5) == ORACLE.expected(longer, 5)


async def test_a_decode_worker_that_was_restarted_has_nothing(local_cluster: LocalCluster) -> None:
    prompt = prompt_of(100, 1)
    async with local_cluster() as cluster:
        for _ in range(2):
            assert await cluster.generate(prompt, 10) == ORACLE.expected(prompt, 10)
            await cluster.settled()
            await cluster.kill("decode-0")
            await cluster.until(lambda: not cluster.core.cluster.accepting("decode"))
            await cluster.start_decode("decode-0")
            await cluster.until(lambda: bool(cluster.core.cluster.accepting("decode")))
            assert landed(cluster) == (0, 0)


async def test_a_prefill_killed_under_a_shared_landing_costs_no_request_a_token(
    local_cluster: LocalCluster,
) -> None:
    slow = FaultInjection("memory", FaultPlan(delay_s=0.05))
    shared = prompt_of(100, 1)
    async with local_cluster(
        lambda: FakeEngine(SLOW), n_prefill=2, backends=(slow,), n_kvstore=0
    ) as cluster:
        first, second = [[*shared, *prompt_of(60, 2 + i)] for i in range(2)]
        stream = cluster.events(first, 300)
        tokens = [(await anext(stream)).token for _ in range(3)]
        other = asyncio.create_task(cluster.generate(second, 20))

        def busy() -> list[str]:
            return [name for name in ("prefill-0", "prefill-1") if cluster.worker(name).jobs]

        await cluster.until(lambda: bool(busy()))
        await cluster.kill(busy()[0])
        assert await other == ORACLE.expected(second, 20)
        tokens += [event.token async for event in stream]
        assert tokens == ORACLE.expected(first, 300)
        await cluster.settled(stores=False)


async def test_a_group_leaves_out_the_blocks_that_decode_has(local_cluster: LocalCluster) -> None:
    shared = prompt_of(200, 1)
    async with local_cluster(n_prefill=2, group_size=2) as cluster:
        for i in range(3):
            prompt = [*shared, *prompt_of(300, 2 + i)]
            assert await cluster.generate(prompt, 20) == ORACLE.expected(prompt, 20)
            await cluster.settled()
        sent, held = landed(cluster)
        assert held == 2 * (200 // SIZE)
        assert landing_bytes(cluster, "sent", 2) == sent * LAYOUT.block_bytes
        assert landing_bytes(cluster, "held", 2) == held * LAYOUT.block_bytes
        shares = [cluster.worker(f"prefill-{i}").shell.counts.n_shares for i in range(2)]
        assert max(shares), "no prompt was computed by the group"


# -- a caller in place of the conductor ----------------------------------------------------------


class Scene:
    """A decode worker, and a caller that reserves and starts by itself."""

    def __init__(self, cluster: Any, caller: WorkerCaller) -> None:
        self.caller = caller
        self.worker = cluster.worker("decode-0")

    async def reserve(
        self, name: str, prompt: list[int], hashes: tuple[BlockHash, ...] | None = None
    ) -> DecodeReserved:
        n_before = sum(isinstance(m, DecodeReserved) for m in self.caller.received)
        known = chain_of(prompt) if hashes is None else hashes
        await self.caller.send(reserve(name, len(prompt), 1000, block_hashes=known))
        *_, landed = await self.caller.wait_for(DecodeReserved, n_before + 1)
        assert isinstance(landed, DecodeReserved)
        return landed

    async def run(self, name: str, prompt: list[int]) -> None:
        """Have a request decode over whatever is in its landing, until it is cancelled."""
        await self.reserve(name, prompt)
        await self.caller.send(start_decode(name, 1, len(prompt), 1000))
        await self.caller.wait_for(TokensProduced)


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    @asynccontextmanager
    async def open_scene(**settings: Any) -> Any:
        async with local_cluster(n_prefill=0, n_kvstore=0, **settings) as cluster:
            caller = await dial(cluster, "decode-0")
            yield Scene(cluster, caller)
            for name in "abc":
                await caller.send(Cancel(request_id=RequestId(name)))
            await cluster.settled()
            await caller.close()

    return open_scene


async def test_a_landing_that_was_given_up_is_not_kept(scene: Any) -> None:
    async with scene() as at:
        prompt = prompt_of(40, 1)
        await at.reserve("a", prompt)
        await at.caller.send(Cancel(request_id=RequestId("a")))
        assert (await at.reserve("b", prompt)).n_held_blocks == 0
        assert at.worker.pages.kept.n_unheld == 0


async def test_pages_in_doubt_are_not_given_back_with_those_that_they_share(scene: Any) -> None:
    settings = {"quarantine_s": 60.0, "transfer_grants": "off"}  # their writer stays a danger
    async with scene(decode_settings=settings) as at:
        prompt = prompt_of(100, 1)
        await at.run("a", prompt)
        shared = await at.reserve("b", prompt)
        assert shared.n_held_blocks == 100 // SIZE
        await at.caller.send(Cancel(request_id=RequestId("b"), landing_in_doubt=True))
        again = await at.reserve("c", prompt)
        assert again.landing.pages[:6] == shared.landing.pages[:6]
        assert again.landing.pages[6] != shared.landing.pages[6]
        at.worker.check()
        at.worker.batch.expire(1e12)


async def test_more_hashes_than_blocks_are_refused_with_the_numbers(scene: Any) -> None:
    async with scene() as at:
        await at.caller.send(reserve("a", 20, block_hashes=chain_of(prompt_of(40, 1))))
        (refused,) = await at.caller.wait_for(DecodeRefused)
        assert "block_hashes has 2 hashes, 20 tokens fill 1 blocks of 16" in refused.reason
        assert not refused.retryable


async def test_a_chain_of_one_block_again_and_again_shares_its_page_once(scene: Any) -> None:
    async with scene() as at:
        prompt = prompt_of(100, 1)
        await at.run("a", prompt)
        absurd = await at.reserve("b", prompt, chain_of(prompt)[:1] * 6)
        assert absurd.n_held_blocks == 1
        assert len(set(absurd.landing.pages)) == 7
        at.worker.check()


async def test_a_prefill_that_would_write_to_shared_pages_is_refused(scene: Any) -> None:
    async with scene(decode_settings=LOCAL) as at:
        prompt = prompt_of(100, 1)
        await at.run("a", prompt)
        landed = await at.reserve("b", prompt)
        for i, (n_held, sampling) in enumerate(
            ((0, GREEDY), (5, GREEDY), (6, Sampling(temperature=0.0, prompt_logprobs=0)))
        ):
            more = {"block_hashes": chain_of(prompt), "n_held_blocks": n_held, "sampling": sampling}
            await at.caller.send(start_prefill("b", prompt, landed.landing, 1000, **more))
            *_, failed = await at.caller.wait_for(PrefillFailed, i + 1)
            said = "prompt_logprobs" if n_held == 6 else f"n_held_blocks is {n_held}"
            assert said in failed.reason and not failed.retryable


async def test_a_prefill_worker_refuses_a_landing_that_lacks_nothing(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(n_kvstore=0) as cluster:
        caller = await dial(cluster, "prefill-0")
        landing = Landing(cluster.memories["decode-0"].region, tuple(range(3)), LAYOUT)
        await caller.send(start_prefill("a", prompt_of(48, 1), landing, n_held_blocks=3))
        (failed,) = await caller.wait_for(PrefillFailed)
        assert "n_held_blocks is 3: at least the last block of 48 tokens" in failed.reason
        await caller.close()
