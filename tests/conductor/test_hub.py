"""The hub's links: a worker that can't be told something is lost, whatever it still says."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from halfmoon_conductor.core_metrics import CoreMetrics
from halfmoon_conductor.gateway import Gateway
from halfmoon_conductor.hub import Hub
from halfmoon_conductor.shell import Shell
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    Hello,
    Message,
    Produced,
    TokensProduced,
    Unwelcome,
    Welcome,
)
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.network import PeerUnreachable, Port
from halfmoon_scheduling.conductor import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.testing import a_worker

DECODE = WorkerId("decode-0")


class ScriptedLink:
    """A link whose worker welcomes everybody; its sends can be made to fail."""

    def __init__(self, name: str) -> None:
        self.info = a_worker(name)
        self.told: list[Message] = []
        self.deaf = False
        self.inbox: asyncio.Queue[AnyMessage | None] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        if self.deaf:
            raise PeerUnreachable("its queue is full")
        self.told.append(message)
        if isinstance(message, Hello):
            self.inbox.put_nowait(Welcome(worker=self.info))

    async def receive(self) -> AnyMessage:
        message = await self.inbox.get()
        if message is None:
            raise PeerUnreachable("closed")
        return message

    async def close(self) -> None:
        self.inbox.put_nowait(None)


class ScriptedNetwork:
    def __init__(self) -> None:
        self.links: list[ScriptedLink] = []

    async def dial(self, commands: str, events: str | None = None) -> ScriptedLink:
        self.links.append(ScriptedLink("decode-0"))
        return self.links[-1]

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> Port:
        raise AssertionError("a conductor binds nothing")

    async def close(self) -> None:
        pass


class Running:
    """A hub at work with one decode worker in the metadata store."""

    async def __aenter__(self) -> "Running":
        self.network, store = ScriptedNetwork(), MemoryStore()
        self.core = Conductor(SchedulingConfig())
        shell = Shell(self.core, FakeClock())
        gateway = Gateway(shell)
        metrics = CoreMetrics(self.core, CollectorRegistry())
        self.hub = Hub(self.network, store, ConductorId("c"), shell, gateway, metrics)
        shell.connect(self.hub, gateway)
        await Membership(store, a_worker("decode-0")).join()
        self.task = asyncio.create_task(self.hub.run())
        await self.until(lambda: DECODE in self.core.cluster)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)


async def test_a_worker_that_takes_no_messages_is_lost_and_dialled_again() -> None:
    async with Running() as running:
        first = running.network.links[0]
        first.deaf = True
        running.hub.send(DECODE, Cancel(request_id=RequestId("r")))
        await running.until(lambda: len(running.network.links) == 2)
        await running.until(lambda: DECODE in running.core.cluster)
        hellos = [link.told[0] for link in running.network.links]
        assert all(isinstance(hello, Hello) for hello in hellos)
        sessions = [hello.session for hello in hellos if isinstance(hello, Hello)]
        assert sessions == sorted(set(sessions)), "a worker could not tell the two apart"


async def test_tokens_that_nobody_waits_for_are_stopped_at_their_source() -> None:
    async with Running() as running:
        link = running.network.links[0]
        nobody = RequestId("gone")
        link.inbox.put_nowait(TokensProduced(step=1, produced=(Produced(nobody, 3),)))
        await running.until(lambda: Cancel(request_id=nobody) in link.told)


async def test_a_refused_worker_is_told_why_and_not_dialled_again() -> None:
    async with Running() as running:
        running.hub.refuse(DECODE, "another layout")
        link = running.network.links[0]
        await running.until(lambda: Unwelcome(reason="another layout") in link.told)
        await link.close()
        await running.until(lambda: running.hub.refusals() == {DECODE: "another layout"})
        assert len(running.network.links) == 1
