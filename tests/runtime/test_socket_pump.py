"""A socket's messages on the event loop: all of them, in bounded turns, and none without room."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sized
from typing import Any

import pytest
import uvloop
import zmq

from halfmoon_runtime.channels.socket_pump import BATCH_MESSAGES, Frames, SocketPump

Sockets = Callable[[int], "zmq.Socket[bytes]"]
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Sockets of one context, that delivers within the process at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(kind: int) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(0)
        return socket

    yield make
    context.destroy(linger=0)


def on_both_loops(test: Callable[[Sockets], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on both event loops: services use one, tests the other."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def both(run: Run, sockets: Sockets) -> None:
        run(test(sockets))

    both.__name__ = test.__name__
    return both


def joined(sockets: Sockets, n_peers: int = 1) -> "list[zmq.Socket[bytes]]":
    """A ROUTER and its peers."""
    router = sockets(zmq.ROUTER)
    router.bind("inproc://router")
    peers = [sockets(zmq.DEALER) for _ in range(n_peers)]
    for i, peer in enumerate(peers):
        peer.setsockopt(zmq.ROUTING_ID, b"peer %d" % i)
        peer.connect("inproc://router")
    return [router, *peers]


async def until_full(taken: Sized, n: int) -> None:
    """Wait until there are so many."""
    async with asyncio.timeout(30):
        while len(taken) < n:
            await asyncio.sleep(0)


@on_both_loops
async def test_messages_from_before_and_from_later_are_handed_over(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    peer.send(b"before")
    taken: list[Frames] = []
    pump = SocketPump(router)
    pump.start(taken.append)
    await until_full(taken, 1)
    for number in range(200):
        peer.send(b"%d" % number)
        await until_full(taken, number + 2)
    pump.stop()
    assert [frames[1] for frames in taken] == [b"before", *(b"%d" % n for n in range(200))]


@on_both_loops
async def test_a_peer_that_sends_without_pause_keeps_nobody_waiting(sockets: Sockets) -> None:
    router, chatty, other = joined(sockets, 2)
    for _ in range(1000):
        chatty.send(b"again")
    other.send(b"once")
    turn = 0
    taken: list[tuple[int, bytes]] = []
    pump = SocketPump(router)
    pump.start(lambda frames: taken.append((turn, frames[0])))
    while len(taken) < 1001:
        await asyncio.sleep(0)
        turn += 1
    pump.stop()
    per_turn = Counter(turn for turn, _ in taken)
    # The signal and the look that is due may both come in one turn of the event loop.
    assert max(per_turn.values()) <= 2 * BATCH_MESSAGES
    assert b"peer 1" in [peer for _, peer in taken[:4]]


@on_both_loops
async def test_large_messages_end_a_turn_early(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    for _ in range(20):
        peer.send(bytes(1024 * 1024))
    turn = 0
    taken: list[int] = []
    pump = SocketPump(router)
    pump.start(lambda frames: taken.append(turn))
    while len(taken) < 20:
        await asyncio.sleep(0)
        turn += 1
    pump.stop()
    assert max(Counter(taken).values()) <= 2


@on_both_loops
async def test_a_message_whose_signal_a_send_consumed_is_handed_over(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    taken: list[Frames] = []
    pump = SocketPump(router)
    pump.start(taken.append)
    for number in range(1000):
        peer.send(b"%d" % number)
        pump.send_now(b"peer 0", b"answer")  # without a turn of the event loop between
        if number % 3 == 0:
            await until_full(taken, number + 1)
    await until_full(taken, 1000)
    pump.stop()
    assert [peer.recv() for _ in range(1000)] == [b"answer"] * 1000


@on_both_loops
async def test_a_message_of_many_frames_loses_most_of_its_bytes(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    peer.send_multipart([bytes(100_000)] * 1000)
    peer.send(b"next")
    taken: list[Frames] = []
    pump = SocketPump(router)
    pump.start(taken.append)
    await until_full(taken, 2)
    pump.stop()
    assert len(taken[0]) == 1001
    assert sum(map(len, taken[0])) < 1_000_000
    assert taken[1] == [b"peer 0", b"next"]


@on_both_loops
async def test_an_error_ends_the_reading_and_is_reported_once(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    peer.send(b"first")
    peer.send(b"second")
    failures: list[str] = []

    def take(frames: Frames) -> None:
        raise ValueError(frames[1].decode())

    pump = SocketPump(router)
    pump.start(take, on_failure=lambda: failures.append("failed"))
    await until_full(failures, 1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert failures == ["failed"]


@on_both_loops
async def test_settling_ends_when_nothing_comes_any_more(sockets: Sockets) -> None:
    router, peer = joined(sockets)
    taken: list[Frames] = []
    pump = SocketPump(router)
    pump.start(taken.append)
    for _ in range(500):
        peer.send(b"late")
    await pump.settle()
    assert len(taken) == 500
    pump.stop()
    await pump.settle()  # of a stopped one nothing is waited for
