"""What a worker's conductors hear, and which requests are let go when one is gone."""

import asyncio
from dataclasses import dataclass, field

import pytest

from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import Cancel, Hello, Message, PrefillStopped, Welcome
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.channels.network import PeerId, Port, WorkerLink
from halfmoon_runtime.worker.conductor_connections import ConductorConnections, RejectedByConductors
from halfmoon_runtime.worker.standstill import SETTLE_S, STANDSTILL_S
from tests.runtime.service_parts import info_of

ONE, TWO, THREE = RequestId("1"), RequestId("2"), RequestId("3")
EAST, WEST = ConductorId("east"), ConductorId("west")


@dataclass
class Worker:
    """A port, its conductors, and what was let go."""

    port: Port
    network: MemoryNetwork
    let_go: list[RequestId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conductors = ConductorConnections(self.port, self.let_go.append)
        self.owners = self.conductors.owners
        self.info = info_of("prefill-0", commands=self.port.commands, events=self.port.events)
        self.welcome = Welcome(worker=self.info)

    async def dialled(self) -> tuple[WorkerLink, PeerId]:
        """A new connection, from both ends."""
        link = await self.network.dial(self.port.commands, self.port.events)
        await link.send(Cancel(request_id=ONE))
        peer, _ = await self.port.receive()
        return link, peer

    async def hear_hello(self, conductor: ConductorId, peer: PeerId) -> None:
        hello = Hello(conductor_id=conductor, session=1)
        await self.conductors.on_hello(hello, peer, self.info)

    async def greeted(self, conductor: ConductorId) -> tuple[WorkerLink, PeerId]:
        """A new connection on which a conductor has said hello."""
        link, peer = await self.dialled()
        await self.hear_hello(conductor, peer)
        return link, peer


@pytest.fixture
async def worker() -> Worker:
    network = MemoryNetwork()
    return Worker(await network.bind("prefill-0"), network)


async def heard(link: WorkerLink, n_messages: int) -> list[object]:
    async with asyncio.timeout(60):
        return [await link.receive() for _ in range(n_messages)]


def answer(request_id: RequestId) -> Message:
    return PrefillStopped(request_id=request_id)


async def test_everybody_who_said_hello_hears_what_the_worker_becomes(worker: Worker) -> None:
    links = [(await worker.greeted(conductor))[0] for conductor in (EAST, WEST)]
    await worker.conductors.broadcast_info(worker.info)
    for link in links:
        assert await heard(link, 2) == [worker.welcome] * 2


async def test_an_answer_that_is_unreachable_lets_go_of_all_it_had_asked(worker: Worker) -> None:
    (east, east_peer), (west, west_peer) = await worker.greeted(EAST), await worker.greeted(WEST)
    for request_id, peer in ((ONE, east_peer), (TWO, west_peer), (THREE, east_peer)):
        worker.owners.add(request_id, peer)
    await east.close()
    await worker.conductors.answer(east_peer, answer(ONE))
    assert worker.let_go == [ONE, THREE]
    await worker.conductors.answer(east_peer, answer(THREE))
    assert worker.let_go == [ONE, THREE], "nothing is let go twice"
    await worker.conductors.answer(west_peer, answer(TWO))
    assert await heard(west, 2) == [worker.welcome, answer(TWO)]
    assert list(worker.owners.conductors.values()) == [WEST]


async def test_a_conductor_that_connects_anew_has_given_up_its_requests(worker: Worker) -> None:
    gone, before = await worker.greeted(EAST)
    worker.owners.add(ONE, before)
    await gone.close()
    link, _ = await worker.greeted(EAST)
    assert worker.let_go == [ONE]
    assert worker.owners.owner_of(ONE) is None
    assert await heard(link, 1) == [worker.welcome]


async def test_a_conductor_that_left_without_requests_is_forgotten(worker: Worker) -> None:
    (gone, _), (link, now) = await worker.greeted(EAST), await worker.greeted(WEST)
    await gone.close()
    for seconds in range(20):
        await worker.conductors.probe(worker.info, float(seconds))
    assert list(worker.owners.conductors.values()) == [WEST]
    assert await heard(link, 2) == [worker.welcome] * 2, "asked once in that time"
    with pytest.raises(RejectedByConductors):
        worker.conductors.on_unwelcome(now, "another layout")


async def test_two_conductors_of_one_name_keep_what_each_has_asked_for(worker: Worker) -> None:
    (first, first_peer), (second, second_peer) = [await worker.dialled() for _ in range(2)]
    for request_id, peer in ((ONE, first_peer), (TWO, second_peer)):
        await worker.hear_hello(EAST, peer)
        worker.owners.add(request_id, peer)
    for request_id, peer in ((ONE, first_peer), (TWO, second_peer)):
        await worker.conductors.answer(peer, answer(request_id))
    assert worker.let_go == []
    assert (await heard(first, 3))[-1] == answer(ONE)
    assert (await heard(second, 2))[-1] == answer(TWO)


async def test_a_worker_goes_only_when_no_conductor_wants_it(worker: Worker) -> None:
    (_, east_peer), (_, west_peer) = await worker.greeted(EAST), await worker.greeted(WEST)
    _, stranger = await worker.dialled()
    worker.owners.add(ONE, west_peer)
    worker.conductors.on_unwelcome(stranger, "who am I to say")
    worker.conductors.on_unwelcome(west_peer, "another layout")
    assert worker.let_go == [ONE]
    worker.conductors.on_unwelcome(west_peer, "another layout, said twice")
    with pytest.raises(RejectedByConductors, match="mine too"):
        worker.conductors.on_unwelcome(east_peer, "mine too")


async def test_after_a_standstill_nothing_is_current_until_it_has_probed(worker: Worker) -> None:
    conductors = worker.conductors
    assert conductors.is_current(100.0)
    for now in (100.0, 101.0, 104.9, 108.8):
        await conductors.probe(worker.info, now)
        assert conductors.is_current(now), "it looked in time"
    assert conductors.is_current(108.8 + STANDSTILL_S)
    assert not conductors.is_current(108.9 + STANDSTILL_S)
    link, peer = await worker.greeted(EAST)
    worker.owners.add(ONE, peer)
    # The connection is closed meanwhile, and that is known a moment after the first look.
    await conductors.probe(worker.info, 120.0)
    assert not conductors.is_current(120.0)
    await link.close()
    await conductors.probe(worker.info, 120.1)
    assert worker.let_go == []
    assert not conductors.is_current(120.1)
    await conductors.probe(worker.info, 120.0 + SETTLE_S)
    assert worker.let_go == [ONE]
    assert conductors.is_current(120.0 + SETTLE_S)
