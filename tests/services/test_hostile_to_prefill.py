"""What a prefill worker makes of messages that nobody should send."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.messages import (
    BlocksLeased,
    CachedPrefix,
    Cancel,
    KvstoreAddress,
    LeaseBlocks,
    Place,
    PrefillDone,
    PrefillFailed,
    PrefillStopped,
    StartPrefill,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.worker_caller import WorkerCaller
from halfmoon_transfer.engine import TransferEngine
from tests.services.asking import (
    LAYOUT,
    ORACLE,
    SLOW,
    dial,
    n_failed,
    prompt_of,
    start_prefill,
)

LocalCluster = Callable[..., Any]
MINE = RequestId("mine")
PROMPT = prompt_of(600)
N_PAGES = 16


class Scene:
    """A cluster with a victim's prompt at prefill, and a stranger with memory of its own."""

    def __init__(self, cluster: Any, stranger: WorkerCaller, region: Region) -> None:
        self.cluster, self.stranger, self.region = cluster, stranger, region
        self.worker = cluster.worker("prefill-0")
        (self.victims_id,) = self.worker.jobs

    def start(self, request_id: str = MINE, **more: Any) -> StartPrefill:
        landing = Landing(self.region, tuple(range(N_PAGES)), LAYOUT)
        return start_prefill(request_id, range(40), **({"landing": landing} | more))


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    """The victim's tokens are the oracle's, whatever happens in the block."""

    @asynccontextmanager
    async def open_scene() -> Any:
        before = n_failed()
        async with local_cluster(lambda: FakeEngine(SLOW), chunk_tokens=16) as cluster:
            worker = cluster.worker("prefill-0")
            victim = asyncio.create_task(cluster.generate(PROMPT, 10))
            await cluster.until(lambda: len(worker.jobs) == 1)
            stranger = await dial(cluster, "prefill-0")
            with TransferEngine.open(
                "stranger", metadata=cluster.store, backends=("memory",)
            ) as transfer:
                memory = transfer.allocate(N_PAGES * LAYOUT.block_bytes)
                scene = Scene(cluster, stranger, memory.region)
                yield scene
                assert await victim == ORACLE.expected(PROMPT, 10)
                await stranger.send(Cancel(request_id=MINE))
                await cluster.settled()
            assert n_failed() == before

    return open_scene


async def test_a_start_said_twice_is_computed_once(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(at.start(), at.start())
        (done,) = await at.stranger.wait_for(PrefillDone)
        assert done.first_token == ORACLE.expected(range(40), 1)[0]
        await at.stranger.send(Cancel(request_id=MINE))
        await at.stranger.wait_for(PrefillStopped)
        assert not [m for m in at.stranger.received if isinstance(m, PrefillFailed)]


async def test_no_connection_has_a_say_over_what_another_one_asked_for(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(
            Cancel(request_id=at.victims_id), at.start(at.victims_id), Cancel(request_id=MINE)
        )
        (failed,) = await at.stranger.wait_for(PrefillFailed)
        assert failed.request_id == at.victims_id
        assert failed.retryable and "another connection" in failed.reason
        (stopped,) = await at.stranger.wait_for(PrefillStopped)
        assert stopped.request_id == MINE, "nothing was said of what still runs"


def wrong_starts() -> list[Any]:
    region = Region("stranger", 1, bytes(16), 3 * LAYOUT.block_bytes)
    short = Landing(region, (0, 1, 3), LAYOUT)
    return [
        ({"token_ids": ()}, "token_ids is empty"),
        ({"token_ids": (1, 997)}, "token_ids has token 997, the vocabulary has 997"),
        ({"token_ids": (1,) * 4097}, "4097 tokens, max_context is 4096"),
        ({"n_prompt": 41}, "n_prompt is 41, token_ids has 40"),
        ({"sampling": Sampling(logit_bias=((5000, 1.0),))}, "logit_bias has token 5000"),
        ({"block_hashes": (BlockHash(bytes(16)),) * 3}, "block_hashes has 3 hashes, 40 tokens"),
        ({"landing": Landing(region, (0, 1), LAYOUT)}, "need 3 pages, the landing has 2"),
        ({"landing": Landing(region, (0, 1, 1), LAYOUT)}, "names a page twice"),
        ({"landing": short}, "page 3 ends at byte"),
    ]


async def test_a_start_that_would_fail_its_pass_is_refused_by_name(scene: Any) -> None:
    async with scene() as at:
        for n, (wrong, named) in enumerate(wrong_starts()):
            await at.stranger.send(at.start(f"mine-{n}", **wrong))
            *_, failed = await at.stranger.wait_for(PrefillFailed, n + 1)
            assert named in failed.reason and not failed.retryable


async def test_a_landing_that_is_not_there_fails_its_own_request(scene: Any) -> None:
    async with scene() as at:
        gone = Region(at.region.segment, at.region.generation, bytes(16), at.region.length)
        await at.stranger.send(at.start(landing=Landing(gone, tuple(range(16)), LAYOUT)))
        (failed,) = await at.stranger.wait_for(PrefillFailed)
        assert "did not reach stranger" in failed.reason


async def test_a_draining_worker_takes_no_start_and_finishes_what_it_has(scene: Any) -> None:
    async with scene() as at:
        draining = msgspec.structs.replace(at.worker.info, draining=True)
        leaving = asyncio.create_task(at.worker.drain(draining, 60.0))
        await at.cluster.until(lambda: at.worker.info.draining)
        await at.stranger.send(at.start())
        (failed,) = await at.stranger.wait_for(PrefillFailed)
        assert failed.retryable and "stopping" in failed.reason
        await leaving


async def test_a_kvstore_that_leases_nonsense_is_done_without(scene: Any) -> None:
    asked = BlockHash(b"h" * 16)
    nonsense = [
        (Place(BlockHash(b"other".ljust(16)), 0, 1),),
        (Place(asked, 2**40, 1),),  # out of the region
        (Place(asked, 0, 1),) * 3,  # more than asked for
    ]
    async with scene() as at:
        for n, places in enumerate(nonsense):
            liar = await at.cluster.network.bind(f"liar-{n}")

            async def lie(liar: Any = liar, places: Any = places) -> None:
                while True:
                    peer, message = await liar.receive()
                    if isinstance(message, LeaseBlocks):
                        leased = BlocksLeased(message.ticket, at.region, places, expires_s=9.0)
                        await liar.send(peer, leased)

            lying = asyncio.create_task(lie())
            cached = CachedPrefix(KvstoreAddress(WorkerId(f"liar-{n}"), 1, liar.commands), 1)
            hashes = (asked, BlockHash(b"i" * 16))
            await at.stranger.send(at.start(f"mine-{n}", block_hashes=hashes, cached=cached))
            *_, done = await at.stranger.wait_for(PrefillDone, n + 1)
            assert done.n_cached == 0
            assert done.first_token == ORACLE.expected(range(40), 1)[0]
            await at.stranger.send(Cancel(request_id=RequestId(f"mine-{n}")))
            lying.cancel()
