"""Answers without a limit of their own: they take what is free, and end where nothing fits."""

from collections.abc import Callable, Sequence
from typing import Any

from halfmoon_engine.fake_engine import FakeEngine, FakeModelSpec
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import StartDecode
from halfmoon_protocol.sampling import Stopping
from halfmoon_scheduling.commands import Send
from halfmoon_scheduling.placement import worker_limits
from tests.services.asking import prompt_of

LocalCluster = Callable[..., Any]
SIZE = 16
CONTEXT = 131_072


def engine() -> FakeEngine:
    return FakeEngine(FakeModelSpec(max_context=CONTEXT), block_size=SIZE)


async def answer(cluster: Any, prompt: Sequence[int], **more: Any) -> tuple[list[int], str]:
    """Generate without a limit, as chats do; return the tokens and the finish."""
    limit = cluster.gateway.model.open_end(len(prompt))
    stopping = Stopping(max_new_tokens=limit, **more)
    events = [e async for e in cluster.events(prompt, 0, stopping=stopping, open_end=True)]
    return [event.token for event in events], events[-1].finish


async def test_a_context_longer_than_any_pool_refuses_no_open_end(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(engine, n_pages=64) as cluster:
        card = cluster.gateway.model
        assert (card.max_context, card.max_tokens) == (CONTEXT, 64 * SIZE)
        tokens, finish = await answer(cluster, prompt_of(31))
        # Half of the pool is left to others.
        assert (len(tokens), finish) == (32 * SIZE, "length")
        assert tokens == engine().expected(prompt_of(31), len(tokens))
        tokens, finish = await answer(cluster, prompt_of(1000))
        assert (len(tokens), finish) == (24, "length")
        await cluster.settled()


async def test_an_open_end_holds_the_pages_of_its_prompt_and_grows(
    local_cluster: LocalCluster,
) -> None:
    async with local_cluster(engine, n_pages=64) as cluster:
        decode = cluster.worker("decode-0")
        stopping = Stopping(max_new_tokens=cluster.gateway.model.open_end(31))
        held = []
        stream = cluster.events(prompt_of(31), 0, stopping=stopping, open_end=True)
        async for _ in stream:
            held.append(decode.pages.n_pages - decode.pages.n_free)
            if len(held) == 3 * SIZE:
                break
        await stream.aclose()
        assert held[0] <= 3 < max(held) <= 7
        await cluster.settled()


async def test_an_answer_that_outgrows_a_small_worker_goes_on_at_a_larger_one(
    local_cluster: LocalCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr(worker_limits, "OPEN_END_ROOM_TOKENS", 2 * SIZE)
    async with local_cluster(engine, n_pages=8, n_decode=1) as cluster:
        cluster.n_pages = 64
        await cluster.start_prefill("prefill-1")
        await cluster.start_decode("decode-1")
        await cluster.until(lambda: len(cluster.core.cluster.accepting("decode")) == 2)
        at: list[WorkerId] = []
        cluster.shell.add_recorder(
            lambda now, event, commands: at.extend(
                command.worker_id
                for command in commands
                if isinstance(command, Send) and isinstance(command.message, StartDecode)
            )
        )
        other = cluster.events(prompt_of(900)[::-1], 100)  # keeps decode-1 the busier one
        await anext(other)
        tokens, finish = await answer(cluster, prompt_of(31))
        await other.aclose()
        assert (len(tokens), finish) == (32 * SIZE, "length")
        assert tokens == engine().expected(prompt_of(31), len(tokens))
        assert at == ["decode-1", "decode-0", "decode-1"]
        await cluster.settled()
