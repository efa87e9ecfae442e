"""With a cluster key, who does not have it hears nothing and changes nothing."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from halfmoon_protocol.cluster_keys import cluster_key_id
from halfmoon_protocol.codec import encode
from halfmoon_protocol.curve_secrets import curve_secrets
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.kv_events import BlockStored
from halfmoon_protocol.messages import Cancel
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.channels.zmq_sockets import SocketSettings
from tests.runtime.service_parts import dropped, is_unreachable, until

KEY = "only good for tests of networks"
MESSAGE = Cancel(request_id=RequestId("hello"))
#: Of the key 0123456789abcdef0123456789abcdef, as docs/protocol.md has them.
GOLDEN_PORT = "0ad085de79fbe28f6c2f2364e88daa3ef06685f583a0bf75b064ad9554f2fdea"
GOLDEN_CALLER = "c9985eecf56b41f7ff5ec2c37f540a9c5da91088588c285fda559f1072d39ccb"
_SETTINGS = SocketSettings(connect_timeout_s=1.0)


@asynccontextmanager
async def opened(key: str, settings: SocketSettings | None = None) -> AsyncIterator[ZmqNetwork]:
    network = ZmqNetwork(settings, cluster_key=key)
    try:
        yield network
    finally:
        await network.close()


@pytest.fixture
async def network() -> AsyncIterator[ZmqNetwork]:
    async with opened(KEY) as network:
        yield network


@contextmanager
def stock(*kinds: int) -> Iterator[list[Any]]:
    """Sockets of ZeroMQ alone."""
    context = zmq.asyncio.Context()
    sockets: list[Any] = [context.socket(kind) for kind in kinds]
    for socket in sockets:
        socket.setsockopt(zmq.LINGER, 0)
        if socket.socket_type == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
    try:
        yield sockets
    finally:
        for socket in sockets:
            socket.close()
        context.term()


def use_curve(socket: Any, public: bytes, secret: bytes) -> None:
    """Call a port of the key with a pair of keys."""
    server = zmq.curve_public(z85.encode(curve_secrets(KEY).port))
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)


def test_the_keys_are_those_that_the_protocol_says() -> None:
    secrets = curve_secrets("0123456789abcdef0123456789abcdef")
    assert secrets.port.hex() == GOLDEN_PORT
    assert secrets.caller.hex() == GOLDEN_CALLER
    assert secrets.port.hex() not in repr(secrets)


@pytest.mark.parametrize("key", ["", "the key of another cluster"])
async def test_a_caller_with_another_key_or_none_is_not_connected(
    network: ZmqNetwork, key: str
) -> None:
    port = await network.bind("worker")
    async with opened(key, _SETTINGS) as stranger:
        link = await stranger.dial(port.commands, port.events)
        await is_unreachable(link.receive())


#: What each process has, step by step, while a cluster's key is changed.
NEW_KEY = "as good, and newer"
STEPS = [KEY, f"{KEY}\n{NEW_KEY}", f"{NEW_KEY}\n{KEY}", NEW_KEY]


@pytest.mark.parametrize("there", range(4))
async def test_while_a_key_is_changed_neighbouring_steps_connect_and_others_are_told(
    there: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as networks:
        network = await networks.enter_async_context(opened(STEPS[there]))
        port = await network.bind("worker")
        assert port.key_id == cluster_key_id(STEPS[there].split("\n")[0])
        for here in range(4):
            caller = await networks.enter_async_context(opened(STEPS[here], _SETTINGS))
            before = dropped("unknown_key")
            link = await caller.dial(port.commands, port.events, key_id=port.key_id)
            # A caller that has the port's key at any place connects: this includes all neighbours.
            if STEPS[there].split("\n")[0] in STEPS[here].split("\n"):
                await link.send(MESSAGE)
                peer, message = await port.receive()
                assert message == MESSAGE
                await port.send(peer, MESSAGE)
                assert await link.receive() == MESSAGE
                continue
            assert abs(here - there) > 1
            await is_unreachable(link.send(MESSAGE), f"cluster key {port.key_id}.*second line")
            assert dropped("unknown_key") == before + 1
        assert KEY not in caplog.text


@pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0), (2, 3)])
async def test_a_port_that_names_no_key_is_called_with_the_first(here: int, there: int) -> None:
    """Records of earlier releases name none."""
    async with opened(STEPS[there]) as network, opened(STEPS[here]) as caller:
        port = await network.bind("worker")
        link = await caller.dial(port.commands)
        await link.send(MESSAGE)
        assert (await port.receive())[1] == MESSAGE


async def test_a_caller_without_a_key_is_told_that_the_port_has_one(network: ZmqNetwork) -> None:
    port = await network.bind("worker")
    async with opened("") as caller:
        link = await caller.dial(port.commands, key_id=port.key_id)
        await is_unreachable(link.send(MESSAGE), "this process has none: set HALFMOON_CLUSTER")


async def test_a_caller_with_a_key_is_not_connected_to_a_port_without() -> None:
    async with opened("") as impostor, opened(KEY, _SETTINGS) as caller:
        port = await impostor.bind("worker")
        link = await caller.dial(port.commands)
        await is_unreachable(link.send(MESSAGE))


async def test_who_knows_only_the_ports_public_key_is_refused_and_counted(
    network: ZmqNetwork,
) -> None:
    port = await network.bind("worker")
    before = dropped("stranger")
    with stock(zmq.DEALER, zmq.SUB) as (dealer, sub):
        for socket, address in ((dealer, port.commands), (sub, port.events)):
            use_curve(socket, *zmq.curve_keypair())
            socket.connect(address)
        await dealer.send(encode(MESSAGE))
        await until(lambda: dropped("stranger") >= before + 2)


async def test_a_stock_subscriber_hears_no_prompt_and_a_stock_dealer_gives_no_command(
    network: ZmqNetwork,
) -> None:
    port = await network.bind("worker")
    friend = await network.dial(port.commands, port.events)
    before = dropped("handshake")
    with stock(zmq.DEALER, zmq.SUB) as (dealer, sub):
        sub.connect(port.events)
        dealer.connect(port.commands)
        await dealer.send(encode(MESSAGE))
        await until(lambda: dropped("handshake") >= before + 2)
        event = BlockStored(
            block_hashes=(b"h" * 32,), parent_block_hash=None, token_ids=(7,) * 64, block_size=64
        )
        await port.publish_kv([event])
        await friend.send(Cancel(request_id=RequestId("of the friend")))
        _, message = await port.receive()
        assert message == Cancel(request_id=RequestId("of the friend"))
        await friend.receive()  # the event has gone out
        assert not await sub.poll(0)
