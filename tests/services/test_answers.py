"""What decode has computed is kept at the kvstore, and the next turn of a conversation reads it."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    AnswerChain,
    BlocksReserved,
    Cancel,
    CommitBlocks,
    DecodeReserved,
    KvstoreAddress,
    KvstoreRefused,
    Place,
    ReserveBlocks,
    RevokeBlocks,
    TokensProduced,
)
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.backends.fault_injection import FaultInjection, FaultPlan
from halfmoon_transfer.engine import TransferEngine
from halfmoon_workers.decode import answer_keeper
from tests.services.asking import (
    LAYOUT,
    ORACLE,
    SLOW,
    chain_of,
    dial,
    prompt_of,
    reserve,
    start_decode,
)

LocalCluster = Callable[..., Any]
SIZE = LAYOUT.block_size


def whole(n_tokens: int) -> int:
    return n_tokens // SIZE * SIZE


def n_blocks(cluster: Any, result: str) -> int:
    metric = cluster.worker("decode-0").metrics()["halfmoon_decode_answer_blocks_total"][1]
    return int(metric.values[(result,)])


async def turns(cluster: Any, n_turns: int, **more: Any) -> list[tuple[int, int]]:
    """Have a conversation; of each turn, the tokens that were cached and that came before it."""
    said: list[int] = []
    seen: list[tuple[int, int]] = []
    for turn in range(n_turns):
        prompt = [*said, *prompt_of(21 + 9 * turn, turn)]
        events = [event async for event in cluster.events(prompt, 50, **more)]
        answer = [event.token for event in events]
        assert answer == ORACLE.expected(prompt, 50)
        seen.append((events[0].n_cached, len(said)))
        said = [*prompt, *answer]
        await cluster.settled()
    return seen


@pytest.mark.parametrize("n", [1, 2])
async def test_each_turn_reads_all_whole_blocks_of_the_prompts_and_answers_before_it(
    local_cluster: LocalCluster, n: int
) -> None:
    async with local_cluster(n_prefill=n, n_decode=n, n_kvstore=n) as cluster:
        for n_cached, n_before in await turns(cluster, 6):
            assert n_cached == whole(max(0, n_before - 1))  # the last token was never run


async def test_turns_that_are_prefilled_at_decode_read_the_answers_before_them(
    local_cluster: LocalCluster,
) -> None:
    settings = {"local_prefill_tokens": 128, "keep_pages": False}
    async with local_cluster(decode_settings=settings) as cluster:
        for n_cached, n_before in await turns(cluster, 6):
            assert n_cached == whole(max(0, n_before - 1))
        pool = cluster.worker("prefill-0").metrics()["halfmoon_prefill_requests_ended_total"][1]
        assert pool.values["done",] < 6, "no turn was prefilled at decode"


async def test_a_worker_that_keeps_no_answers_leaves_the_prompts_alone(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(decode_settings={"keep_answers": False}) as cluster:
        first, second = await turns(cluster, 2)
        assert (first, second) == ((0, 0), (whole(21), 71))


async def test_an_answer_behind_a_prompt_of_less_than_a_block_is_found(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster() as cluster:
        answer = await cluster.generate([3], 40)
        await cluster.settled()
        assert await cluster.n_cached([3, *answer, 9]) == whole(40)


async def test_another_tenant_finds_nothing_of_an_answer(local_cluster: LocalCluster) -> None:
    async with local_cluster() as cluster:
        prompt = prompt_of(5, 1)
        answer = await cluster.generate(prompt, 40, salt="a", tenant="a")
        await cluster.settled()
        for salt, n_cached in (("b", 0), ("a", whole(44))):
            again = cluster.events([*prompt, *answer], 1, salt=salt)
            assert [event.n_cached async for event in again] == [n_cached]


async def test_answers_count_against_the_quota_of_their_tenant(local_cluster: LocalCluster) -> None:
    mib = 3 * LAYOUT.block_bytes / (1 << 20)
    async with local_cluster(tenant_quotas_mib=f"lab={mib}") as cluster:
        store = cluster.worker("kvstore-0")
        for salt in range(3):
            prompt = prompt_of(20, salt)
            assert await cluster.generate(prompt, 60, tenant="lab") == ORACLE.expected(prompt, 60)
            await cluster.settled()
        assert store.tiers.tenants.n_blocks("lab") == store.tiers.memory.n_stored == 3


async def test_a_full_kvstore_costs_no_token_and_no_page(local_cluster: LocalCluster) -> None:
    async with local_cluster(kvstore_mib=1) as cluster:
        n_slots = (1 << 20) // LAYOUT.block_bytes
        prompts = [prompt_of(20, salt) for salt in range(12)]
        n_new = 2 * n_slots * SIZE // len(prompts)  # twice as many blocks as fit
        answers = await asyncio.gather(*(cluster.generate(p, n_new) for p in prompts))
        assert answers == [ORACLE.expected(p, n_new) for p in prompts]
        await cluster.settled()
        assert cluster.worker("kvstore-0").tiers.memory.n_stored <= n_slots


async def test_a_kvstore_killed_in_mid_answer_costs_no_token_and_no_page(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(lambda: FakeEngine(SLOW)) as cluster:
        prompt = prompt_of(20, 1)
        stream = cluster.events(prompt, 200)
        tokens = [(await anext(stream)).token for _ in range(40)]
        await cluster.kill("kvstore-0")
        tokens += [event.token async for event in stream]
        assert tokens == ORACLE.expected(prompt, 200)
        await cluster.settled()
        assert n_blocks(cluster, "failed") and not n_blocks(cluster, "kept") > 3


async def test_what_a_client_that_leaves_has_got_is_kept(local_cluster: LocalCluster) -> None:
    async with local_cluster(lambda: FakeEngine(SLOW)) as cluster:
        prompt = prompt_of(20, 1)
        stream = cluster.events(prompt, 1000)
        tokens = [(await anext(stream)).token for _ in range(60)]
        await stream.aclose()
        await cluster.settled()
        assert await cluster.n_cached([*prompt, *tokens, 1]) >= whole(20 + 59)


async def test_a_decode_worker_killed_while_it_puts_leaves_nothing_wrong_behind(
    local_cluster: LocalCluster,
) -> None:
    slow = FaultInjection("memory", FaultPlan(delay_s=0.05))
    async with local_cluster(n_decode=2, backends=(slow,)) as cluster:
        prompt = prompt_of(40, 1)
        asking = asyncio.create_task(cluster.generate(prompt, 300))

        def busy() -> list[str]:
            names = ("decode-0", "decode-1")
            return [name for name in names if not cluster.worker(name).answers.is_idle]

        await cluster.until(lambda: bool(busy()))
        await cluster.kill(busy()[0])
        assert await asking == ORACLE.expected(prompt, 300)
        await cluster.settled(stores=False)
        longer = [*prompt, *ORACLE.expected(prompt, 300), 4]
        assert await cluster.generate(longer, 20) == ORACLE.expected(longer, 20)


# -- a kvstore that answers as the test likes ---------------------------------------------------


class Scene:
    """A decode worker, a caller in place of the conductor, and a kvstore in the test's hands."""

    def __init__(self, cluster: Any, caller: WorkerCaller, home: Any, transfer: Any) -> None:
        self.cluster, self.caller, self.home = cluster, caller, home
        self.worker = cluster.worker("decode-0")
        self.n_asked = 0
        self.store = transfer.allocate(64 * LAYOUT.block_bytes)
        self.address = KvstoreAddress(WorkerId("home"), 1, home.commands)

    async def decode(self, name: str, n_tokens: int, n_new: int) -> None:
        """Start a request on whatever is in its landing."""
        await self.caller.send(reserve(name, n_tokens, n_new))
        self.n_asked += 1
        await self.caller.wait_for(DecodeReserved, self.n_asked)
        prompt = prompt_of(n_tokens, 7)
        hashes = chain_of(prompt)
        chain = AnswerChain(self.address, hashes[-1], tuple(prompt[len(hashes) * SIZE :]))
        await self.caller.send(start_decode(name, 1, n_tokens, n_new, answer_chain=chain))

    async def ended(self, name: str) -> None:
        """Wait for the last token of a request."""

        def finished() -> list[str]:
            steps = [m for m in self.caller.received if isinstance(m, TokensProduced)]
            return [one.request_id for m in steps for one in m.produced if one.finish]

        await self.cluster.until(lambda: name in finished())

    async def next_put(self) -> tuple[Any, ReserveBlocks]:
        async with asyncio.timeout(60):
            while True:
                peer, message = await self.home.receive()
                if isinstance(message, ReserveBlocks):
                    return peer, message

    async def give_room(self, peer: Any, put: ReserveBlocks) -> None:
        """Reserve what a put asks for, from the sixth place of the store on."""
        places = tuple(Place(h, (5 + i) * LAYOUT.block_bytes) for i, h in enumerate(put.hashes))
        reserved = BlocksReserved(
            ticket=put.ticket, region=self.store.region, places=places, expires_s=60.0
        )
        await self.home.send(peer, reserved)


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    """Nothing is held at the end, whatever the kvstore did."""

    @asynccontextmanager
    async def open_scene(**settings: Any) -> Any:
        async with local_cluster(n_prefill=0, n_kvstore=0, **settings) as cluster:
            home = await cluster.network.bind("home")
            caller = await dial(cluster, "decode-0")
            backends = cluster.backends
            with TransferEngine.open("home", metadata=cluster.store, backends=backends) as transfer:
                at = Scene(cluster, caller, home, transfer)
                yield at
                await cluster.settled()
            await home.close()

    return open_scene


async def test_a_kvstore_that_does_not_answer_delays_no_token(scene: Any) -> None:
    async with scene(decode_settings={"kvstore_timeout_s": 0.3}) as at:
        await at.decode("a", 40, 100)
        await at.ended("a")
        assert at.worker.pages.n_free < at.worker.pages.n_pages  # its blocks wait
        await at.cluster.until(lambda: at.worker.pages.n_free == at.worker.pages.n_pages)
        assert n_blocks(at.cluster, "kept") == 0


async def test_blocks_that_wait_give_way_to_a_new_request(scene: Any) -> None:
    async with scene(n_pages=8, decode_settings={"kvstore_timeout_s": 60.0}) as at:
        await at.decode("a", 40, 80)  # 8 pages in the end
        await at.next_put()  # of its first block; never answered
        await at.ended("a")
        assert (
            at.worker.pages.n_free
            < 7
            <= (at.worker.pages.n_free + at.worker.answers.reclaimable_pages)
        )
        await at.decode("b", 100, 2)  # 7 pages
        await at.ended("b")
        assert n_blocks(at.cluster, "dropped")


async def test_more_blocks_than_may_wait_are_dropped_and_counted(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_keeper, "MAX_WAITING_BLOCKS", 3)
    async with scene(decode_settings={"kvstore_timeout_s": 60.0}) as at:
        await at.decode("a", 40, 104)  # blocks 2 to 7
        peer, put = await at.next_put()
        await at.ended("a")
        assert n_blocks(at.cluster, "dropped") == 2
        await at.home.send(peer, KvstoreRefused(ticket=put.ticket, reason="full"))
        await at.cluster.until(lambda: at.worker.answers.is_idle)
        counts = {name: n_blocks(at.cluster, name) for name in ("kept", "dropped", "failed")}
        assert counts == {"kept": 0, "dropped": 5, "failed": 1}


async def test_blocks_that_wait_give_way_to_a_request_that_grows(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_keeper, "_PUT_LIMIT_S", 60.0)
    async with scene(n_pages=8, decode_settings={"kvstore_timeout_s": 60.0}) as at:
        await at.decode("a", 40, 80)  # 8 pages in the end
        peer, put = await at.next_put()
        await at.ended("a")
        assert at.worker.pages.n_free == 3
        await at.decode("b", 20, 50)  # 5 pages in the end
        await at.ended("b")
        assert n_blocks(at.cluster, "dropped") and not n_blocks(at.cluster, "failed")
        for asker, asked in ((peer, put), await at.next_put()):
            await at.home.send(asker, KvstoreRefused(ticket=asked.ticket, reason="full"))


async def test_bytes_are_those_of_the_pages_and_what_gets_no_room_ends_the_answer(
    scene: Any,
) -> None:
    async with scene() as at:
        await at.decode("a", 40, 60)
        peer, put = await at.next_put()
        assert put.parent == chain_of(prompt_of(40, 7))[-1]
        assert put.token_ids[:9] == (*prompt_of(40, 7)[32:], 1)
        page = at.worker.batch.page_of(RequestId("a"), 2)
        await at.give_room(peer, put)
        async with asyncio.timeout(60):
            _, commit = await at.home.receive()
        assert isinstance(commit, CommitBlocks) and len(commit.checksums) == 1
        pool = at.cluster.memories["decode-0"].view
        size = LAYOUT.block_bytes
        written = bytes(at.store.view[5 * size : 6 * size])
        assert written == bytes(pool[page * size : (page + 1) * size])
        await at.home.send(peer, KvstoreRefused(ticket=commit.ticket, reason="too late"))
        async with asyncio.timeout(60):
            _, revoke = await at.home.receive()
        assert isinstance(revoke, RevokeBlocks)
        await at.ended("a")
        await at.cluster.until(lambda: at.worker.answers.is_idle)
        counts = {name: n_blocks(at.cluster, name) for name in ("kept", "dropped", "failed")}
        assert counts == {"kept": 0, "dropped": 3, "failed": 1}


async def test_a_put_that_takes_too_long_gives_its_pages_back_once_its_write_is_over(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_keeper, "_PUT_LIMIT_S", 0.05)
    slow = FaultInjection("memory", FaultPlan(delay_s=0.5))
    async with scene(backends=(slow,)) as at:
        await at.decode("a", 40, 20)  # one block
        peer, put = await at.next_put()
        await at.give_room(peer, put)
        transfer = at.cluster.members["decode-0"].transfer
        await at.cluster.until(lambda: not at.worker.answers.held_pages)
        assert transfer.stats().n_live == 0
        assert n_blocks(at.cluster, "failed") == 1


async def test_a_write_under_way_keeps_its_pages_after_a_cancellation(scene: Any) -> None:
    slow = FaultInjection("memory", FaultPlan(delay_s=0.3))
    async with scene(backends=(slow,)) as at:
        await at.decode("a", 40, 1000)
        peer, put = await at.next_put()
        await at.give_room(peer, put)
        transfer = at.cluster.members["decode-0"].transfer
        await at.cluster.until(lambda: transfer.stats().n_live > 0)
        await at.caller.send(Cancel(request_id=RequestId("a")))
        await at.cluster.until(lambda: not at.worker.batch.n_running)
        at.worker.check()
        held = at.worker.answers.held_pages
        assert held and all(at.worker.pages.n_holders(page) for page in held)
