"""A source delivers a server's events in order over losses, restarts and nonsense."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.kv_events import AllBlocksCleared
from halfmoon_servers.kv_events.block_translator import BlockTranslator
from halfmoon_servers.kv_events.event_endpoint import EventEndpoint
from halfmoon_servers.kv_events.event_source import (
    CacheEvents,
    CacheReset,
    KvEventSource,
    SourceItem,
    SourceLimits,
)
from halfmoon_servers.kv_events.followed_cache import follow_cache
from halfmoon_servers.kv_events.server_events import ServerBlockRemoved
from halfmoon_servers.kv_events.server_salts import ServerSalts
from tests.servers.event_publisher import EventPublisher

LIMITS = SourceLimits(reconnect_s=0.05, replay_timeout_s=0.3, replay_interval_s=0.05)


@pytest.fixture
async def publisher() -> AsyncGenerator[EventPublisher, None]:
    publisher = EventPublisher()
    yield publisher
    await publisher.close()


@asynccontextmanager
async def restarted(publisher: EventPublisher) -> AsyncGenerator[EventPublisher, None]:
    """A server that begins anew at the ports of another."""
    await publisher.close()
    again = EventPublisher(ports=publisher.ports)
    try:
        yield again
    finally:
        await again.close()


def removed(number: int) -> list[Any]:
    return ["BlockRemoved", [number]]


@asynccontextmanager
async def followed(
    publisher: EventPublisher, limits: SourceLimits = LIMITS
) -> AsyncGenerator[tuple[KvEventSource, AsyncGenerator[SourceItem, None]], None]:
    source = KvEventSource(publisher.endpoint, limits)
    async with aclosing(source.follow()) as items:
        yield source, items


async def numbers(items: AsyncGenerator[SourceItem, None], n: int) -> list[Any]:
    """The next `n` removed blocks, and "reset" for each reset before the last of them."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        while sum(each != "reset" for each in found) < n:
            match await anext(items):
                case CacheReset():
                    found.append("reset")
                case CacheEvents(events):
                    for event in events:
                        assert isinstance(event, ServerBlockRemoved)
                        found += event.block_hashes
    return found


@pytest.mark.parametrize("sglang", [False, True])
async def test_events_from_before_the_connection_and_after_it_come_in_order(sglang: bool) -> None:
    publisher = EventPublisher(sglang=sglang)
    try:
        for number in range(3):
            await publisher.publish(removed(number))
        source = KvEventSource(publisher.endpoint, LIMITS)
        async with aclosing(source.follow()) as items:
            assert await numbers(items, 3) == [0, 1, 2]
            await publisher.subscribed()
            await publisher.publish(removed(3))
            assert await numbers(items, 1) == [3]
            assert (source.counts.replays, source.is_connected) == (1, True)
        assert not source.is_connected
    finally:
        await publisher.close()


async def test_lost_batches_are_replayed(publisher: EventPublisher) -> None:
    async with followed(publisher) as (source, items):
        await publisher.publish(removed(0))
        assert await numbers(items, 1) == [0]
        await publisher.subscribed()
        await publisher.publish(removed(1), lost=True)
        await publisher.publish(removed(2), lost=True)
        await publisher.publish(removed(3))
        assert await numbers(items, 3) == [1, 2, 3]
        assert publisher.replays == [0, 0]
        assert source.n_gaps == 0


async def test_a_replay_that_does_not_come_leaves_a_gap(publisher: EventPublisher) -> None:
    publisher.answers_replays = False
    async with followed(publisher) as (source, items):
        await publisher.publish(removed(0), lost=True)
        waiting = asyncio.create_task(numbers(items, 1))
        await publisher.subscribed()
        await publisher.publish(removed(1))
        assert await waiting == [1]
        assert (source.counts.failed_replays, source.n_gaps) == (1, 1)


async def test_a_replay_over_the_bounds_is_given_up(publisher: EventPublisher) -> None:
    for number in range(20):
        await publisher.publish(removed(number))
    limits = SourceLimits(reconnect_s=0.05, max_replay_batches=5)
    async with followed(publisher, limits) as (source, items):
        assert await numbers(items, 5) == [0, 1, 2, 3, 4]
        waiting = asyncio.create_task(numbers(items, 1))
        while source.counts.failed_replays == 0:
            await asyncio.sleep(0.01)
        assert source.counts.failed_replays == 1
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_broken_payloads_are_counted_and_the_rest_comes(publisher: EventPublisher) -> None:
    async with followed(publisher) as (source, items):
        await publisher.publish(raw=b"\xc1")
        await publisher.publish(["Unknown", 1], removed(1))
        assert await numbers(items, 1) == [1]
        assert (source.counts.malformed, source.counts.unknown_events) == (1, 1)


@pytest.mark.parametrize(
    "frames", [[b"kv@tiny"], [b"kv@tiny", b"short", b""], [b"kv@tiny"] + [b"x"] * 9]
)
async def test_frames_that_are_none_are_counted(frames: list[bytes]) -> None:
    context: Any = zmq.asyncio.Context.instance()
    pub = context.socket(zmq.XPUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    source = KvEventSource(EventEndpoint(f"tcp://127.0.0.1:{port}", None, "kv@"), LIMITS)
    async with aclosing(source.follow()) as items:
        waiting = asyncio.create_task(numbers(items, 1))
        await asyncio.wait_for(pub.recv(), 30)
        await pub.send_multipart(frames)
        right = b"\x92\xca\x3f\x80\x00\x00\x91\x92\xacBlockRemoved\x91\x07"
        await pub.send_multipart([b"kv@", bytes(8), right])
        assert await waiting == [7]
    assert source.counts.malformed == 1
    pub.close(linger=0)


async def test_a_source_waits_for_a_server_that_is_not_there_yet(publisher: EventPublisher) -> None:
    await publisher.close()
    async with followed(publisher) as (_, items):
        waiting = asyncio.create_task(numbers(items, 1))
        await asyncio.sleep(0)
        async with restarted(publisher) as late:
            await late.publish(removed(5))
            assert await waiting == [5]


async def test_an_endpoint_that_is_none_ends_nothing() -> None:
    source = KvEventSource(EventEndpoint("nonsense"), LIMITS)
    async with aclosing(source.follow()) as items:
        waiting = asyncio.create_task(anext(items))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_a_followed_cache_changes_in_our_hashes(publisher: EventPublisher) -> None:
    translator = BlockTranslator("m", 16, ServerSalts())
    prompt = list(range(32))
    await publisher.publish(["BlockStored", [1, 2], None, prompt, 16, None, "GPU"])
    source = KvEventSource(publisher.endpoint, LIMITS)
    async with aclosing(follow_cache(source, translator)) as changes:
        async with asyncio.timeout(60):
            await anext(changes)
        assert list(translator.held()) == block_hashes(prompt, model="m", block_size=16)
        async with restarted(publisher), asyncio.timeout(60):
            assert await anext(changes) == (AllBlocksCleared(),)
