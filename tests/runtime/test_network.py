"""One suite for every network: what a service may rely on, whatever carries its messages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from halfmoon_protocol.errors import MessageTooLarge
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    KvEventBatch,
)
from halfmoon_protocol.messages import Cancel, DecodeFailed, Hello
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.channels.network import Network, PeerId, PeerUnreachable, Port, WorkerLink
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.channels.zmq_sockets import SocketSettings
from tests.runtime.service_parts import is_unreachable

KEY = "only good for tests of networks"


@asynccontextmanager
async def opened(kind: str, *, patience_s: float) -> AsyncIterator[Network]:
    """A network that holds a peer that is silent for so long to be gone."""
    network: Network
    if kind == "memory":
        network = MemoryNetwork(inbox_messages=50, unread_s=patience_s)
    else:
        settings = SocketSettings(
            send_queue_messages=50, command_queue_messages=50, unread_messages=1200,
            connect_timeout_s=patience_s, heartbeat_interval_s=patience_s / 4,
            heartbeat_timeout_s=patience_s,
        )  # fmt: skip
        network = ZmqNetwork(settings, cluster_key=KEY if kind == "zmq with a key" else "")
    yield network
    async with asyncio.timeout(60):
        await network.close()


@pytest.fixture(params=["memory", "zmq", "zmq with a key"])
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    """More patient than a busy machine is slow."""
    async with opened(request.param, patience_s=30.0) as network:
        yield network


@pytest.fixture(params=["memory", "zmq", "zmq with a key"])
async def hasty(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    """For what must be found out to be gone."""
    async with opened(request.param, patience_s=0.5) as network:
        yield network


def numbered(n: int) -> Cancel:
    return Cancel(request_id=RequestId(str(n)))


def number(message: object) -> int:
    assert isinstance(message, Cancel)
    return int(message.request_id)


async def connected(network: Network) -> tuple[Port, WorkerLink]:
    port = await network.bind("decode-0")
    return port, await network.dial(port.commands, port.events)


async def called(network: Network) -> tuple[Port, WorkerLink, PeerId]:
    """A port and a link to it, whose first message has been read; its sender."""
    port, link = await connected(network)
    await link.send(numbered(1))
    peer, _ = await port.receive()
    return port, link, peer


async def listening(network: Network, port: Port) -> WorkerLink:
    """A link that hears what the port publishes from now on."""
    link = await network.dial(port.commands, port.events)
    marker = Hello(conductor_id=ConductorId("marker"), session=0)

    async def mark() -> None:
        while True:
            await port.publish(marker)
            await asyncio.sleep(0.01)

    marking = asyncio.create_task(mark())
    assert await link.receive() == marker
    marking.cancel()
    # The last marker may still be on its way: it is followed by one of another number.
    last = Hello(conductor_id=ConductorId("marker"), session=1)
    await port.publish(last)
    while await link.receive() != last:
        pass
    return link


def big(i: int = 1, n: int = 1_000_000) -> DecodeFailed:
    return DecodeFailed(request_id=RequestId(str(i)), reason="x" * n, retryable=True)


async def persist(send: Callable[[], Awaitable[None]], why: str = "") -> None:
    """Send again while the queue is full."""
    while True:
        try:
            return await send()
        except PeerUnreachable as error:
            assert why in str(error)
            await asyncio.sleep(0.001)


async def test_messages_keep_their_order_both_ways(network: Network) -> None:
    port, link = await connected(network)
    n = 500

    async def command() -> None:
        for i in range(n):
            await persist(partial(link.send, numbered(i)), "full")

    commanding = asyncio.create_task(command())
    assert [number((await port.receive())[1]) for _ in range(n)] == list(range(n))
    await commanding

    await link.send(numbered(0))
    peer, _ = await port.receive()
    for start in range(0, n, 20):
        for i in range(start, start + 20):
            await port.send(peer, numbered(i))
        assert [number(await link.receive()) for _ in range(20)] == [*range(start, start + 20)]


async def test_commands_of_many_callers_are_answered_to_who_asked(network: Network) -> None:
    port = await network.bind("decode-0")
    links = [await network.dial(port.commands) for _ in range(8)]
    for i, link in enumerate(links):
        await link.send(numbered(i))

    def answer(n: int) -> DecodeFailed:
        return DecodeFailed(request_id=RequestId(str(n)), reason="because", retryable=True)

    for _ in links:
        peer, message = await port.receive()
        await port.send(peer, answer(number(message)))
    assert [await link.receive() for link in links] == [answer(i) for i in range(8)]


async def test_what_is_published_reaches_every_listener_and_nobody_else(network: Network) -> None:
    port = await network.bind("kvstore-0")
    listeners = [await listening(network, port) for _ in range(3)]
    deaf = await network.dial(port.commands)
    told = Hello(conductor_id=ConductorId("everybody"), session=7)
    await port.publish(told)
    for link in listeners:
        received = await link.receive()
        while received != told and isinstance(received, Hello):  # markers of later listeners
            received = await link.receive()
        assert received == told
    await deaf.send(numbered(1))
    peer, _ = await port.receive()
    await port.send(peer, numbered(2))
    assert await deaf.receive() == numbered(2)


async def test_kv_events_are_numbered_from_zero_and_lose_their_tokens(network: Network) -> None:
    port = await network.bind("kvstore-0")
    link = await listening(network, port)
    hashes = (b"\x01" * 16, b"\xff" * 16)
    fields: dict[str, Any] = {"parent_block_hash": None, "block_size": 16, "medium": "CPU"}
    stored, with_tokens = (
        BlockStored(block_hashes=hashes, token_ids=tuple(range(n)), **fields) for n in (0, 32)
    )
    published: list[tuple[KvEvent, ...]] = [
        (stored,),
        (BlockRemoved(block_hashes=(b"\x01" * 16,)), stored),
    ]
    published += [(AllBlocksCleared(),)] * 28
    # Tokens are sent, and not received.
    sent = [(with_tokens,), *published[1:]]
    numbers = [await port.publish_kv(events) for events in sent]
    assert numbers == list(range(30))
    received = [await link.receive() for _ in published]
    batches = [b for b in received if isinstance(b, KvEventBatch)]
    assert [b.sequence for b in batches] == list(range(30))
    assert [b.events for b in batches] == published


async def test_a_send_to_a_caller_that_hung_up_is_refused(network: Network) -> None:
    port, link, peer = await called(network)
    await link.close()
    with pytest.raises(PeerUnreachable, match="gone"):
        async with asyncio.timeout(60):
            while True:  # until the port has noticed
                await port.send(peer, numbered(2))
                await asyncio.sleep(0.01)


async def test_a_caller_that_reads_slowly_misses_nothing(network: Network) -> None:
    port, link, peer = await called(network)
    n, n_tasks = 1000, 4

    async def answer(first: int) -> None:
        for i in range(first, n, n_tasks):
            await port.send(peer, big(i, 10_000))

    answering = [asyncio.create_task(answer(first)) for first in range(n_tasks)]
    heard = []
    for _ in range(n):
        message = await link.receive()
        assert isinstance(message, DecodeFailed)
        heard.append(int(message.request_id))
        await asyncio.sleep(0.002)
    await asyncio.gather(*answering)
    for first in range(n_tasks):
        assert [i for i in heard if i % n_tasks == first] == [*range(first, n, n_tasks)]


async def test_a_send_that_waits_for_a_caller_ends_when_it_hangs_up(network: Network) -> None:
    port, link, peer = await called(network)
    n_begun = n_sent = 0

    async def answer() -> None:
        nonlocal n_begun, n_sent
        while True:
            n_begun += 1
            await port.send(peer, big())
            n_sent += 1
            await asyncio.sleep(0)

    answering = asyncio.create_task(answer())
    while n_begun == n_sent:  # one that does not wait is over before others run
        await asyncio.sleep(0)
    await link.close()
    await is_unreachable(answering, "gone")


async def test_a_caller_that_reads_nothing_is_gone_in_the_end_and_both_sides_know(
    hasty: Network,
) -> None:
    port, link, peer = await called(hasty)
    with pytest.raises(PeerUnreachable):
        for _ in range(300):
            await port.send(peer, big())
            await asyncio.sleep(0)
    with pytest.raises(PeerUnreachable):
        while True:
            await link.receive()


async def test_what_came_before_the_end_is_delivered_and_no_more(network: Network) -> None:
    port, link, peer = await called(network)
    for i in range(40):
        await port.send(peer, numbered(i))
    await port.close()
    assert [number(await link.receive()) for _ in range(40)] == list(range(40))
    for _ in range(2):  # and it stays down
        await is_unreachable(link.receive())
        await is_unreachable(link.send(numbered(2)))


async def test_a_link_does_not_follow_a_worker_that_is_restarted(network: Network) -> None:
    port, link = await connected(network)
    await port.close()
    await is_unreachable(link.receive())
    again = await network.bind("decode-0")
    assert again.commands != port.commands
    await is_unreachable(link.send(numbered(1)))
    link = await network.dial(again.commands)
    await link.send(numbered(2))
    assert (await again.receive())[1] == numbered(2)


async def test_a_waiting_receive_hears_of_the_end(network: Network) -> None:
    port, link = await connected(network)
    at_link = asyncio.create_task(link.receive())
    at_port = asyncio.create_task(port.receive())
    await asyncio.sleep(0)
    await port.close()
    for waiting in (at_link, at_port):
        await is_unreachable(waiting)


async def test_hanging_up_ends_our_own_receive(network: Network) -> None:
    _, link = await connected(network)
    waiting = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    for _ in range(2):
        await link.close()
    await is_unreachable(waiting, "hung up")


async def test_a_link_to_nobody_and_one_to_no_endpoint_are_down(hasty: Network) -> None:
    port = await hasty.bind("decode-0")
    await port.close()
    for endpoint in (port.commands, "", "nonsense://x", "tcp://no-port", "mem://absent/1/commands"):
        link = await hasty.dial(endpoint)
        await is_unreachable(link.receive())
        await is_unreachable(link.send(numbered(1)))


async def test_a_message_over_the_limit_is_refused_before_it_is_sent(network: Network) -> None:
    port, link = await connected(network)
    huge, block = big(n=17_000_000), BlockRemoved(block_hashes=(b"x" * 17_000_000,))
    for sending in (link.send(huge), port.publish(huge), port.publish_kv([block])):
        with pytest.raises(MessageTooLarge):
            await sending
    assert await port.publish_kv([AllBlocksCleared()]) == 0
    await link.send(numbered(1))
    assert (await port.receive())[1] == numbered(1)
