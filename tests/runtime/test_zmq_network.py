"""What only real sockets can do to us: garbage, giants, killed and frozen processes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from halfmoon_protocol.codec import VERSION, encode
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import Cancel
from halfmoon_runtime.channels.network import Port, WorkerLink
from halfmoon_runtime.channels.socket_pump import SocketPump
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.channels.zmq_sockets import SocketSettings
from tests.runtime.service_parts import dropped, is_unreachable, until

LIMIT = 10_000
MESSAGE = Cancel(request_id=RequestId("hello"))

WORKER = """
import asyncio, sys
from halfmoon_runtime.channels.zmq_network import ZmqNetwork

async def main():
    port = await ZmqNetwork().bind("worker")
    print(port.commands, port.events, flush=True)
    while True:
        peer, message = await port.receive()
        await port.send(peer, message)

asyncio.run(main())
"""


#: Dials more links than it has descriptors for, then ends.
POOR_CALLER = """
import asyncio, resource, sys
from halfmoon_runtime.channels.network import PeerUnreachable
from halfmoon_runtime.channels.zmq_network import ZmqNetwork

async def main():
    network = ZmqNetwork()
    first = await network.dial(*sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    links = await asyncio.gather(*(network.dial(*sys.argv[1:3]) for _ in range(40)))
    print(first.is_down)
    try:
        await links[-1].receive()
    except PeerUnreachable as error:
        print(error)
    await network.close()
    print("closed", flush=True)

asyncio.run(main())
"""


#: Stands still until it is told to go on and ten heartbeats are due; then answers all callers but
#: its first.
SLOW_WORKER = """
import asyncio, sys, time
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.channels.zmq_sockets import SocketSettings

async def main():
    port = await ZmqNetwork(SocketSettings(heartbeat_interval_s=0.05)).bind("worker")
    print(port.commands, port.events, flush=True)
    sys.stdin.readline()
    time.sleep(0.5)
    first, _ = await port.receive()
    while True:
        peer, message = await port.receive()
        if peer != first:
            await port.send(peer, message)

asyncio.run(main())
"""


@asynccontextmanager
async def opened(*, patience_s: float) -> AsyncIterator[ZmqNetwork]:
    """A network that holds a peer that is silent for so long to be gone."""
    settings = SocketSettings(
        max_message_bytes=LIMIT,
        heartbeat_interval_s=patience_s / 4,
        heartbeat_timeout_s=patience_s,
        connect_timeout_s=20,
    )
    network = ZmqNetwork(settings)
    yield network
    async with asyncio.timeout(60):
        await network.close()


@pytest.fixture
async def network() -> AsyncIterator[ZmqNetwork]:
    """More patient than a busy machine is slow."""
    async with opened(patience_s=20) as network:
        yield network


@pytest.fixture
async def hasty() -> AsyncIterator[ZmqNetwork]:
    """For what must be found out to be gone."""
    async with opened(patience_s=3) as network:
        yield network


#: Makes plain ZeroMQ sockets that do what they like.
Raw = Callable[[int], "zmq.Socket[bytes]"]


@pytest.fixture
def raw() -> Iterator[Raw]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(kind: int) -> "zmq.Socket[bytes]":
        plain = context.socket(kind)
        plain.setsockopt(zmq.LINGER, 0)
        return plain

    yield make
    context.destroy(linger=0)


GARBAGE = [
    pytest.param([b""], "malformed", id="empty"),
    pytest.param([bytes([VERSION])], "malformed", id="version only"),
    pytest.param([bytes([VERSION + 1]) + encode(MESSAGE)[1:]], "unknown_version", id="version"),
    pytest.param([bytes([VERSION]) + b"\xc1garbage"], "malformed", id="not msgpack"),
    pytest.param([bytes([VERSION]) + b"\x91" * 5000], "malformed", id="deeply nested"),
    pytest.param(
        [bytes([VERSION]) + msgspec.msgpack.encode({"type": "no_such"})], "malformed", id="no tag"
    ),
    pytest.param(
        [bytes([VERSION]) + msgspec.msgpack.encode({"type": "cancel", "request_id": 3})],
        "malformed",
        id="wrong type",
    ),
    pytest.param([b"\x80\x04\x95pickle."], "unknown_version", id="pickle"),
    pytest.param([encode(MESSAGE), encode(MESSAGE)], "frames", id="two frames"),
    pytest.param([b"x" * (LIMIT + 1)], "too_large", id="a little too large"),
]


@pytest.mark.parametrize(("frames", "reason"), GARBAGE)
async def test_garbage_on_the_command_socket_is_counted_and_dropped(
    network: ZmqNetwork, raw: Raw, frames: list[bytes], reason: str
) -> None:
    port = await network.bind("worker")
    dealer = dealer_to(raw, port.commands)
    before = dropped(reason)
    dealer.send_multipart(frames)
    await until(lambda: dropped(reason) == before + 1)
    dealer.send(encode(MESSAGE))
    assert (await port.receive())[1] == MESSAGE


def dealer_to(raw: Raw, endpoint: str) -> "zmq.Socket[bytes]":
    dealer = raw(zmq.DEALER)
    dealer.connect(endpoint)
    return dealer


async def serves(port: Port, link: WorkerLink) -> bool:
    await link.send(MESSAGE)
    return (await port.receive())[1] == MESSAGE


async def test_a_giant_frame_costs_its_sender_the_connection_and_us_nothing(
    network: ZmqNetwork, raw: Raw
) -> None:
    port = await network.bind("worker")
    dealer = raw(zmq.DEALER)
    dealer.setsockopt(zmq.RECONNECT_IVL, -1)
    monitor = dealer.get_monitor_socket(int(zmq.Event.DISCONNECTED))
    dealer.connect(port.commands)
    dealer.send(encode(MESSAGE))
    assert (await port.receive())[1] == MESSAGE
    dealer.send(b"x" * 5_000_000)
    assert await asyncio.to_thread(monitor.poll, 5000), "the sender is still connected"
    monitor.close()
    link = await network.dial(port.commands)
    assert await serves(port, link)


@asynccontextmanager
async def running(program: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is killed in the end."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdin=pipe, stdout=pipe
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def addresses_of(worker: asyncio.subprocess.Process) -> list[str]:
    assert worker.stdout is not None
    return (await worker.stdout.readline()).decode().split()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_link_to_who_dies_or_freezes_goes_down(
    hasty: ZmqNetwork, how: signal.Signals
) -> None:
    async with running(WORKER) as worker:
        link = await hasty.dial(*await addresses_of(worker))
        await link.send(MESSAGE)
        assert await link.receive() == MESSAGE
        os.kill(worker.pid, how)
        await is_unreachable(link.receive(), "lost")
        await is_unreachable(link.send(MESSAGE), "lost")


async def test_a_caller_that_floods_a_worker_and_leaves_does_not_end_it(
    network: ZmqNetwork, raw: Raw
) -> None:
    async with running(SLOW_WORKER) as worker:
        commands, events = await addresses_of(worker)
        dealer = raw(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, 5000)
        dealer.connect(commands)
        for _ in range(20_000):
            await asyncio.to_thread(dealer.send, encode(MESSAGE))
        dealer.close(linger=0)
        assert worker.stdin is not None
        worker.stdin.write(b"read\n")
        async with asyncio.timeout(60):
            link = await network.dial(commands, events)
            await link.send(MESSAGE)
            assert await link.receive() == MESSAGE


async def test_a_caller_that_floods_a_port_loses_its_own_messages_and_others_are_served(
    raw: Raw,
) -> None:
    network = ZmqNetwork(SocketSettings(unread_messages=100))
    port = await network.bind("worker")
    dealer = dealer_to(raw, port.commands)
    before = dropped("flooded")
    for _ in range(1000):
        dealer.send(encode(MESSAGE))
    await until(lambda: dropped("flooded") == before + 900)
    link = await network.dial(port.commands, port.events)
    await link.send(MESSAGE)
    async with asyncio.timeout(60):
        callers = [(await port.receive())[0] for _ in range(101)]
    assert len(set(callers[:100])) == 1
    assert callers[100] != callers[0]
    dealer.send(encode(MESSAGE))
    async with asyncio.timeout(60):
        assert (await port.receive())[0] == callers[0]
    await network.close()


async def test_a_worker_that_sends_more_than_is_read_is_hung_up_on(raw: Raw) -> None:
    network = ZmqNetwork(SocketSettings(unread_messages=100))
    router = raw(zmq.ROUTER)
    link = await network.dial(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    await link.send(MESSAGE)
    peer, _ = await asyncio.to_thread(router.recv_multipart)
    for _ in range(200):
        router.send_multipart([peer, encode(MESSAGE)])
    await until(lambda: link.is_down)
    async with asyncio.timeout(60):
        for _ in range(100):
            assert await link.receive() == MESSAGE
        await is_unreachable(link.receive(), "more than is read, 100 messages wait")
    await network.close()


@pytest.mark.timeout(60)
def test_a_send_that_finds_the_queue_full_notices_that_the_caller_left_meanwhile(raw: Raw) -> None:
    router, dealer = raw(zmq.ROUTER), raw(zmq.DEALER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 1)
    router.setsockopt(zmq.SNDTIMEO, 500)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    dealer.send(b"hello")
    peer, _ = router.recv_multipart()
    with pytest.raises(zmq.Again):  # the caller's own queue is full too, and all between
        while True:
            router.send_multipart([peer, bytes(1_000_000)])
    dealer.close()
    # The event loop has no turn here: what a send takes from the socket, no reader sees.
    pump = SocketPump(router)
    with pytest.raises(zmq.ZMQError, match="unreachable"):
        while True:
            with contextlib.suppress(zmq.Again):
                pump.send_now(peer, b"more")


async def test_dial_waits_for_a_worker_that_binds_a_little_later(network: ZmqNetwork) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    dialling = asyncio.create_task(network.dial(endpoint))
    await asyncio.sleep(0.3)
    assert not dialling.done()
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    link = await dialling
    await link.send(MESSAGE)
    peer, frame = await router.recv_multipart()
    assert frame == encode(MESSAGE)
    await router.send_multipart([peer, frame])
    assert await link.receive() == MESSAGE
    context.destroy(linger=0)


async def test_a_dial_that_is_given_up_leaves_nothing_behind(network: ZmqNetwork) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        before = asyncio.all_tasks()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await network.dial(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        assert asyncio.all_tasks() == before


async def test_callers_are_given_the_advertised_host() -> None:
    network = ZmqNetwork(advertise_host="decode-0.example")
    port = await network.bind("worker", host="0.0.0.0")
    for address in (port.commands, port.events):
        assert address.startswith("tcp://decode-0.example:")
    await network.close()


FORGETFUL = """
import asyncio, gc
from halfmoon_runtime.channels.zmq_network import ZmqNetwork

async def main():
    port = await ZmqNetwork().bind("worker")
    await ZmqNetwork().dial(port.commands, port.events)

asyncio.run(main())
gc.collect()
print("collected")
"""


def test_a_network_that_is_forgotten_instead_of_closed_stops_nobody() -> None:
    command = [sys.executable, "-c", FORGETFUL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "collected\n", ran.stderr


async def test_a_link_that_is_dialled_while_the_network_closes_is_closed_too() -> None:
    async with opened(patience_s=20) as server:
        port = await server.bind("worker")
        async with opened(patience_s=20) as caller:
            await caller.dial(port.commands)
            closing = asyncio.create_task(caller.close())
            await asyncio.sleep(0)  # it waits for the first link
            late = asyncio.create_task(caller.dial(port.commands))
            async with asyncio.timeout(60):
                await closing
            link = await late
            await is_unreachable(link.send(MESSAGE))


async def test_a_caller_without_descriptors_gets_links_that_are_down_and_ends() -> None:
    async with opened(patience_s=20) as server:
        port = await server.bind("worker")
        async with running(POOR_CALLER, port.commands, port.events) as caller:
            told, _ = await asyncio.wait_for(caller.communicate(), 60)
    first_is_down, reason, end = told.decode().splitlines()
    assert (first_is_down, end) == ("False", "closed")
    assert "too many open files" in reason.lower()
