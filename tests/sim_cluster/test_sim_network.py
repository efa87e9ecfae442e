"""The network between simulated processes keeps the promises of ZeroMQ over TCP."""

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import Cancel
from halfmoon_testing.sim_cluster.sim_network import SimNetwork
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop, VirtualProcess


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.sampled_from(["send", "send", "wait", "cut", "heal", "slow"]), max_size=40),
)
def test_messages_of_a_connection_arrive_in_order_whatever_holds_them_back(
    seed: int, steps: list[str]
) -> None:
    loop = VirtualLoop(random.Random(seed))
    network = SimNetwork(loop, random.Random(seed), lambda _receiver, _text: None)
    worker, conductor = VirtualProcess("worker"), VirtualProcess("conductor")
    received: list[str] = []

    async def run() -> int:
        port = await network.view(worker, loop.time).bind("worker")
        link = await network.view(conductor, loop.time).dial(port.commands)
        n_sent = 0
        for step in steps:
            match step:
                case "send":
                    link.send_now(Cancel(request_id=RequestId(str(n_sent))))
                    n_sent += 1
                case "wait":
                    await asyncio.sleep(0.05)
                case "cut":
                    network.cut("worker", "conductor")
                case "heal":
                    network.heal("worker", "conductor")
                case "slow":
                    network.faults.delay_s = (0.0001, 0.2)
        network.heal("worker", "conductor")
        for _ in range(n_sent):
            _, message = await port.receive()
            assert isinstance(message, Cancel)
            received.append(message.request_id)
        return n_sent

    # A connection is taken down only after a longer cut than these can make.
    n_sent = loop.run_until_complete(run())
    assert received == [str(number) for number in range(n_sent)]


def test_a_peer_that_died_behind_a_cut_is_gone_once_the_cut_heals() -> None:
    loop = VirtualLoop(random.Random(1))
    network = SimNetwork(loop, random.Random(1), lambda _receiver, _text: None)
    worker, conductor = VirtualProcess("worker"), VirtualProcess("conductor")

    async def run() -> None:
        port = await network.view(worker, loop.time).bind("worker")
        link = await network.view(conductor, loop.time).dial(port.commands)
        link.send_now(Cancel(request_id=RequestId("1")))
        await port.receive()
        assert port.peers
        network.cut("worker", "conductor")
        network.on_killed(conductor)
        await asyncio.sleep(1.0)
        assert port.peers, "the worker can't know of it yet"
        network.heal("worker", "conductor")
        await asyncio.sleep(0.1)
        assert not port.peers
        assert not network.connections

    loop.run_until_complete(run())
