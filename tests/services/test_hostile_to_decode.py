"""What a decode worker makes of messages that nobody should send."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_protocol.ids import BlockHash, ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import (
    AnswerChain,
    Cancel,
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    Hello,
    KvstoreAddress,
    ReserveDecode,
    StartDecode,
    TokensProduced,
    Unwelcome,
    Welcome,
)
from halfmoon_protocol.sampling import Sampling
from halfmoon_testing.worker_caller import WorkerCaller
from tests.services.asking import (
    ORACLE,
    SLOW,
    dial,
    n_failed,
    prompt_of,
    reserve,
    start_decode,
)

LocalCluster = Callable[..., Any]
MINE = RequestId("mine")
NOWHERE = KvstoreAddress(WorkerId("nowhere"), 1, "mem://nowhere")
PROMPT = prompt_of(40)


def reserving(request_id: str = MINE, n_new: int = 8) -> ReserveDecode:
    return reserve(request_id, 20, n_new)


def start(request_id: str = MINE, first_token: int = 7, **more: Any) -> StartDecode:
    return start_decode(request_id, first_token, **({"n_prompt": 20} | more))


class Scene:
    """A cluster with a victim at work, and a stranger beside it."""

    def __init__(
        self, cluster: Any, stranger: WorkerCaller, victim: "asyncio.Task[list[int]]"
    ) -> None:
        self.cluster, self.stranger, self.victim = cluster, stranger, victim
        self.worker = cluster.worker("decode-0")
        (self.victims_id,) = self.worker.batch.request_ids()


@pytest.fixture
def scene(local_cluster: LocalCluster) -> Any:
    """The victim's tokens are the oracle's, whatever happens in the block; nothing is held after
    it, and no message was handled by the last line of defence."""

    @asynccontextmanager
    async def open_scene(n_new: int = 60) -> Any:
        before = n_failed()
        async with local_cluster(lambda: FakeEngine(SLOW), n_pages=64) as cluster:
            victim = asyncio.create_task(cluster.generate(PROMPT, n_new))
            await cluster.until(lambda: cluster.worker("decode-0").batch.n_running == 1)
            scene = Scene(cluster, await dial(cluster, "decode-0"), victim)
            yield scene
            assert await victim == ORACLE.expected(PROMPT, n_new)
            await scene.stranger.send(Cancel(request_id=MINE))
            await cluster.settled()
            assert n_failed() == before

    return open_scene


async def test_a_start_said_twice_starts_once(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(reserving(), *[start()] * 3)
        await at.stranger.wait_for(TokensProduced, 7)
        await at.stranger.send(start())
        (failed,) = await at.stranger.wait_for(DecodeFailed)
        assert "no landing" in failed.reason
        tokens = await at.stranger.wait_for(TokensProduced, 7)
        assert [p.finish for t in tokens for p in t.produced] == [""] * 6 + ["length"]


async def test_a_reservation_of_one_token_can_not_be_started(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(reserving(n_new=1), start())
        (failed,) = await at.stranger.wait_for(DecodeFailed)
        assert "nothing to decode" in failed.reason and not failed.retryable
        assert at.worker.batch.request_ids() == [at.victims_id]


PENALTY = Sampling(repetition_penalty=2.0)
WRONG_STARTS: list[tuple[dict[str, Any], str]] = [
    ({"first_token": 997}, "first_token is 997, the vocabulary has 997"),
    ({"first_token": 2**32 - 1}, "4294967295"),
    ({"n_prompt": 21}, "n_prompt is 21, 20 tokens were reserved"),
    ({"sampling": Sampling(logit_bias=((997, 1.0),))}, "logit_bias has token 997"),
    ({"sampling": PENALTY, "history": (1,) * 19}, "history has 19 tokens, 20 were reserved"),
    ({"sampling": PENALTY, "history": (5000,) * 20}, "history has token 5000"),
    (
        {"answer_chain": AnswerChain(NOWHERE, BlockHash(bytes(16)), (1, 2))},
        "answer_chain.tail has 2 tokens, a prompt of 20 has 4 behind its blocks of 16",
    ),
]


async def test_a_start_that_would_fail_its_step_is_refused_by_name(scene: Any) -> None:
    async with scene(n_new=200) as at:
        for n, (wrong, named) in enumerate(WRONG_STARTS):
            await at.stranger.send(reserving(), start(**wrong))
            *_, failed = await at.stranger.wait_for(DecodeFailed, n + 1)
            assert named in failed.reason and not failed.retryable
            assert MINE not in at.worker.batch.request_ids()


async def test_an_answer_for_a_kvstore_that_is_nowhere_is_decoded_and_not_kept(
    scene: Any,
) -> None:
    async with scene() as at:
        chain = AnswerChain(NOWHERE, BlockHash(bytes(16)), (1, 2, 3, 2**32 - 1))
        await at.stranger.send(reserving(n_new=40), start(answer_chain=chain, n_new=40))
        await at.stranger.wait_for(TokensProduced, 39)
        await at.cluster.until(lambda: at.worker.answers.is_idle)
        blocks = at.worker.metrics()["halfmoon_decode_answer_blocks_total"][1]
        assert blocks.values["failed",]


async def test_no_connection_has_a_say_over_what_another_one_asked_for(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(
            Hello(conductor_id=ConductorId("stranger"), session=1),
            Cancel(request_id=at.victims_id),
            Cancel(request_id=at.victims_id, landing_in_doubt=True),
            start(at.victims_id),
            reserving(at.victims_id),
        )
        (failed,) = await at.stranger.wait_for(DecodeFailed)
        (refused,) = await at.stranger.wait_for(DecodeRefused)
        assert "on this connection" in failed.reason and failed.retryable
        assert "another connection" in refused.reason and refused.retryable


async def test_a_landing_is_started_by_the_connection_that_reserved_it(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(reserving())
        await at.stranger.wait_for(DecodeReserved)
        other = await dial(at.cluster, "decode-0")
        await other.send(start(), Cancel(request_id=MINE))
        await other.wait_for(DecodeFailed)
        await at.stranger.send(start())
        await at.stranger.wait_for(TokensProduced, 7)


async def test_a_second_conductor_of_the_victims_name_takes_nothing_from_it(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(*[Hello(conductor_id=ConductorId("conductor-0"), session=1)] * 2)
        await at.stranger.wait_for(Welcome, 2)
        await at.stranger.send(reserving(), start())
        await at.stranger.wait_for(TokensProduced, 7)


async def test_a_conductor_started_again_is_rid_of_what_it_had_asked_for(scene: Any) -> None:
    async with scene() as at:
        hello = Hello(conductor_id=ConductorId("again"), session=1)
        await at.stranger.send(hello, reserving())
        await at.stranger.wait_for(DecodeReserved)
        await at.stranger.close()
        later = await dial(at.cluster, "decode-0")
        await later.send(hello, reserving())
        await later.wait_for(DecodeReserved)
        at.stranger = later
        await later.send(Cancel(request_id=MINE))
        await at.cluster.until(lambda: at.worker.batch.n_reserved == 0)


async def test_the_word_of_one_conductor_ends_no_worker_that_another_one_uses(scene: Any) -> None:
    async with scene() as at:
        await at.stranger.send(Unwelcome(reason="before any hello"))
        await at.stranger.send(Hello(conductor_id=ConductorId("stranger"), session=1))
        await at.stranger.send(Unwelcome(reason="another layout"))
        await at.stranger.send(reserving())
        await at.stranger.wait_for(DecodeReserved)


async def test_a_draining_worker_takes_no_reservation_and_finishes_what_it_has(scene: Any) -> None:
    async with scene(n_new=20) as at:
        await at.stranger.send(reserving("before"))
        await at.stranger.wait_for(DecodeReserved)
        draining = msgspec.structs.replace(at.worker.info, draining=True)
        leaving = asyncio.create_task(at.worker.drain(draining, 60.0))
        await at.cluster.until(lambda: at.worker.info.draining)
        await at.stranger.send(reserving())
        (refused,) = await at.stranger.wait_for(DecodeRefused)
        assert refused.retryable and "stopping" in refused.reason
        await at.stranger.send(start("before"))
        await at.stranger.wait_for(TokensProduced, 7)
        await leaving


UNLUCKY = next(token for token in range(997) if token not in ORACLE.expected(PROMPT, 150))


class Brittle(FakeEngine):
    """An engine that fails every batch which has a certain token in it."""

    def forward(self, runs: Any, **hooks: Any) -> Any:
        if any(run.token_ids == (UNLUCKY,) for run in runs):
            raise RuntimeError("unlucky")
        return super().forward(runs, **hooks)


async def test_a_row_that_fails_its_step_fails_alone(local_cluster: LocalCluster) -> None:
    tokens = ORACLE.expected(PROMPT, 150)
    assert UNLUCKY not in tokens
    async with local_cluster(lambda: Brittle(SLOW)) as cluster:
        victim = asyncio.create_task(cluster.generate(PROMPT, 150))
        worker = cluster.worker("decode-0")
        await cluster.until(lambda: worker.batch.n_running == 1)
        stranger = await dial(cluster, "decode-0")
        await stranger.send(reserving(), start(first_token=UNLUCKY))
        (failed,) = await stranger.wait_for(DecodeFailed)
        assert "forward pass failed" in failed.reason
        assert await victim == tokens
        await cluster.settled()
