"""Links to workers: a worker that accepts no messages is lost, whatever it still sends."""

import asyncio
from math import inf
from typing import Any, Self

import msgspec
import pytest

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest
from halfmoon_conductor.workers import worker_links
from halfmoon_conductor.workers.worker_links import _Member
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    DecodeLoad,
    DecodeReserved,
    Hello,
    Message,
    Produced,
    TokensProduced,
    Unwelcome,
    Welcome,
    WrongVersion,
)
from halfmoon_protocol.sampling import Finish, Sampling, Stopping
from halfmoon_runtime.channels.network import PeerUnreachable, Port
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.membership import MEMBERS, Membership
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import LAYOUT, a_landing, a_prefill_done, a_worker
from tests.conductor.watched_core import LinkedCore

DECODE = WorkerId("decode-0")


class ScriptedLink:
    """A link whose worker welcomes everybody; its sends can be made to fail."""

    def __init__(self, name: str) -> None:
        self.info = a_worker(name)
        self.told: list[Message] = []
        self.deaf = False
        self.inbox: asyncio.Queue[AnyMessage | None] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        self.send_now(message)

    def send_now(self, message: Message) -> None:
        if self.deaf:
            raise PeerUnreachable("its queue is full")
        self.told.append(message)
        if isinstance(message, Hello):
            self.inbox.put_nowait(Welcome(worker=self.info))

    def break_off(self, reason: str) -> None:
        self.inbox.put_nowait(None)

    async def receive(self) -> AnyMessage:
        message = await self.inbox.get()
        if message is None:
            raise PeerUnreachable("closed")
        return message

    async def close(self) -> None:
        self.inbox.put_nowait(None)


class ScriptedNetwork:
    """A network that fails for one address, as one with a bug or without memory may."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.links: list[ScriptedLink] = []
        self.dialled: list[str] = []

    async def dial(
        self, commands: str, events: str | None = None, *, key_id: str = ""
    ) -> ScriptedLink:
        self.dialled.append(commands)
        if commands == self.refuses:
            raise RuntimeError("no link to this one")
        self.links.append(ScriptedLink("decode-0"))
        return self.links[-1]

    async def bind(self, name: str, *, host: str = "127.0.0.1") -> Port:
        raise AssertionError("a conductor binds nothing")

    async def close(self) -> None:
        pass


class Running(LinkedCore):
    """Worker links that run with one decode worker in the metadata store."""

    def __init__(self, network: ScriptedNetwork | None = None) -> None:
        super().__init__(network or ScriptedNetwork(), FakeClock())

    async def __aenter__(self) -> Self:
        await self.register()
        self.task = asyncio.create_task(self.links.run())
        await self.until_live()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    async def until_live(self) -> None:
        await self.until(lambda: DECODE in self.core.cluster)

    async def until_dialled(self, address: str, n: int = 1) -> None:
        await self.until(lambda: self.network.dialled.count(address) >= n)

    async def register(self, name: str = DECODE, **fields: Any) -> None:
        info = msgspec.structs.replace(a_worker(name), **fields)
        await Membership(self.store, info).join()

    def note(self, kind: type[AnyEvent]) -> list[Any]:
        """Events of a kind that happen from now on."""
        noted: list[Any] = []

        def record(now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
            if isinstance(event, kind):
                noted.append(event)

        self.links.shell.add_recorder(record)
        return noted


async def test_a_worker_that_takes_no_messages_is_lost_and_dialled_again() -> None:
    async with Running() as running:
        first = running.network.links[0]
        first.deaf = True
        running.links.send(DECODE, Cancel(request_id=RequestId("r")))
        await running.until(lambda: len(running.network.links) == 2)
        await running.until_live()
        hellos = [link.told[0] for link in running.network.links]
        sessions = [hello.session for hello in hellos if isinstance(hello, Hello)]
        assert len(sessions) == 2
        assert sessions == sorted(set(sessions)), "a worker could not tell the two apart"


async def test_a_start_of_the_same_generation_elsewhere_is_dialled_there() -> None:
    """A metadata server that lost its counters gave two starts the same number."""
    async with Running() as running:
        await running.register(commands="memory://elsewhere")
        await running.until_dialled("memory://elsewhere")
        await running.until_live()


async def test_a_worker_that_answers_stays_whatever_the_metadata_server_forgets() -> None:
    async with Running() as running:
        lost, key = running.note(WorkerLost), MEMBERS + DECODE
        running.store.delete(key)
        member = running.links._members[DECODE]
        await running.until(lambda: not member.has_record)
        await running.register()
        await running.until(lambda: member.has_record)
        running.store.delete(key)
        await running.until(lambda: not member.has_record)
        assert not lost
        assert len(running.network.links) == 1

        running.network.links[0].break_off("")
        await running.until(lambda: lost)
        await running.until(lambda: not running.links._members)
        assert len(running.network.links) == 1, "without a record nothing says that it is there"
        await running.register()
        await running.until_live()


async def test_a_dial_that_fails_costs_its_own_member() -> None:
    network = ScriptedNetwork(refuses="memory://bad")
    async with Running(network) as running:
        await running.register("prefill-0", commands="memory://bad")
        await running.until_dialled("memory://bad", 2)
        assert not running.task.done()
        assert DECODE in running.core.cluster
        await running.register("prefill-0", commands="memory://good", generation=2)
        await running.until_dialled("memory://good")


async def test_a_worker_beyond_the_limit_of_links_waits_and_its_reason_is_named() -> None:
    async with Running() as running:
        running.links.max_links = 1
        await running.register("prefill-0")
        silent = running.links.unreachable._silent
        await running.until(lambda: silent.get(WorkerId("prefill-0")) is not None)
        assert "has links to 1 workers, the most" in silent[WorkerId("prefill-0")].reason
        assert running.network.dialled == [a_worker("decode-0").commands]
        running.store.delete(MEMBERS + DECODE)
        running.network.links[0].break_off("it has left")
        await running.until_dialled(a_worker("prefill-0").commands)


async def test_an_idle_core_is_ticked_again_once_a_request_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_links, "_IDLE_TICK_S", inf)
    async with Served() as running:  # a request has arrived after the first tick
        ticks = running.note(Tick)
        await running.until(lambda: len(ticks) >= 3)
        assert not running.core.is_idle


async def test_tokens_that_nobody_waits_for_are_stopped_at_their_source() -> None:
    async with Running() as running:
        link = running.network.links[0]
        nobody = RequestId("gone")
        link.inbox.put_nowait(TokensProduced(step=1, produced=(Produced(nobody, 3),)))
        await running.until(lambda: Cancel(request_id=nobody) in link.told)
        # More are on their way, and the worker needs to be told once.
        other = RequestId("other")
        for step in range(2, 2000):
            link.inbox.put_nowait(TokensProduced(step=step, produced=(Produced(nobody, 3),)))
        link.inbox.put_nowait(TokensProduced(step=2000, produced=(Produced(other, 3),)))
        await running.until(lambda: Cancel(request_id=other) in link.told)
        assert link.told.count(Cancel(request_id=nobody)) == 1


async def test_a_refused_worker_is_told_why_and_not_dialled_again() -> None:
    async with Running() as running:
        running.links.refuse(DECODE, "another layout")
        link = running.network.links[0]
        said = Unwelcome(reason="another layout", code=error_codes.LAYOUT_MISMATCH)
        await running.until(lambda: said in link.told)
        await link.close()
        await running.until(lambda: running.links.refusals() == {DECODE: "another layout"})
        assert len(running.network.links) == 1


@pytest.mark.parametrize(
    "said",
    [
        WrongVersion(got=1, min_version=2, max_version=3),
        Welcome(worker=msgspec.structs.replace(a_worker("decode-0"), min_version=2, max_version=3)),
    ],
)
async def test_a_worker_of_other_versions_is_refused_by_name_and_lost(said: AnyMessage) -> None:
    async with Running() as running:
        link = running.network.links[0]
        link.inbox.put_nowait(said)
        await running.until(lambda: DECODE not in running.core.cluster)
        (told,) = [m for m in link.told if isinstance(m, Unwelcome)]
        assert told.code == error_codes.VERSION_MISMATCH
        assert "decode-0 speaks protocol versions 2 to 3, this build 1 to 1" in told.reason
        await link.close()
        await running.until(lambda: running.links.refusals() == {DECODE: told.reason})
        assert len(running.network.links) == 1


R1 = RequestId("cmpl-1")


class Served(Running):
    """The same with a request that decode-0 runs, by its own messages and a prefill's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        shell = self.links.shell
        for name in ("prefill-0", "decode-1"):
            member = _Member(a_worker(name), link=ScriptedLink(name))
            self.links._members[WorkerId(name)] = member
            shell.post(WorkerJoined(member.info))
        self.link = self.network.links[0]
        asked = GenerationRequest(
            request_id=R1,
            prompt_token_ids=(1, 2, 3),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_new_tokens=4),
        )

        async def ask() -> None:
            async for event in self.gateway.generate(asked):
                self.tokens.append(event.token)

        self.client = asyncio.create_task(ask())
        await self.until(lambda: R1 in self.core.cluster.decodes.requests(DECODE))
        reserved = DecodeReserved(request_id=R1, landing=a_landing("decode-0"), expires_s=60.0)
        self.say(reserved)
        shell.post(MessageReceived(WorkerId("prefill-0"), a_prefill_done(R1)))
        await self.until(lambda: self.core.decodes_at(R1) == DECODE)
        return self

    def say(self, message: AnyMessage) -> None:
        """As if it came from decode-0, and was read."""
        self.links._receive(self.links._members[DECODE], message)

    async def say_rest(self) -> None:
        """Say three tokens, of which the last is the end; the client has all of them then."""
        for step in range(1, 4):
            self.say(a_step(step, 10 + step, "length" if step == 3 else ""))
        await self.client
        assert self.tokens == [7, 11, 12, 13]

    def say_as(self, worker: str, message: AnyMessage) -> None:
        fresh = _Member(a_worker(worker), link=ScriptedLink(worker))
        member = self.links._members.setdefault(WorkerId(worker), fresh)
        self.links._receive(member, message)


def a_step(step: int, token: int, finish: Finish = "") -> TokensProduced:
    return TokensProduced(step=step, produced=(Produced(R1, token, finish),))


async def test_a_step_said_twice_or_late_gives_its_tokens_once() -> None:
    async with Served() as at:
        for step in (a_step(1, 11), a_step(1, 11), a_step(2, 12), a_step(1, 11), a_step(2, 12)):
            at.say(step)
        at.say(a_step(3, 13, "length"))
        await at.client
        assert at.tokens == [7, 11, 12, 13]


async def test_tokens_from_another_worker_than_the_requests_own_reach_no_client() -> None:
    async with Served() as at:
        at.say_as("decode-1", a_step(1, 666))
        at.say_as("decode-1", a_step(2, 666, "stop"))
        at.say_as("prefill-0", a_step(3, 666, "stop"))
        await at.say_rest()


async def test_a_worker_that_goes_on_past_the_last_token_is_stopped() -> None:
    async with Served() as at:
        for step in range(1, 9):
            at.say(a_step(step, 10 + step))
        await at.client
        assert at.tokens == [7, 11, 12, 13]
        await at.until(lambda: Cancel(request_id=R1) in at.link.told)
        assert at.core.phase_of(R1) is None


async def test_a_worker_that_speaks_for_another_one_is_not_heard() -> None:
    async with Served() as at:
        at.say(Welcome(worker=a_worker("decode-1", generation=9)))
        known = at.core.cluster.get(WorkerId("decode-1"))
        assert known is not None and known.generation == 1


async def test_a_message_that_can_not_be_handled_costs_itself(monkeypatch: Any) -> None:
    async with Served() as at:

        def broken(*_: Any) -> None:
            raise KeyError("a mistake of ours")

        before = FAILED_MESSAGES.labels("DecodeLoad")._value.get()
        monkeypatch.setattr(at.core.cluster.decodes, "on_load", broken)
        load = DecodeLoad(
            n_running=0, n_reserved=0, context_tokens=0, free_pages=1, n_pages=1, step_s=0.0
        )
        at.link.inbox.put_nowait(load)
        at.link.inbox.put_nowait(a_step(1, 11))
        await at.until(lambda: at.tokens == [7, 11])
        assert FAILED_MESSAGES.labels("DecodeLoad")._value.get() == before + 1


async def test_a_kvstore_of_another_layout_is_named_and_not_sent_away() -> None:
    async with Served() as at:
        other = msgspec.structs.replace(LAYOUT, model="halfmoon.bytes")
        at.say_as("kvstore-0", Welcome(worker=a_worker("kvstore-0", layout=other)))
        assert at.links.refusals() == {}
        assert list(at.links._logged_unused) == ["kvstore-0"]


def look_often(at: Running, monkeypatch: pytest.MonkeyPatch, stall_s: float) -> None:
    monkeypatch.setattr(worker_links, "_LOOK_S", 0.02)
    at.links.decode_stall_s = stall_s


async def test_a_worker_that_decodes_and_brings_no_token_is_lost_and_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Served() as at:
        lost = at.note(WorkerLost)
        look_often(at, monkeypatch, 0.2)
        await at.until(lambda: at.core.decodes_at(R1) != DECODE)
        assert len(lost) == 1 and "no token" in lost[0].reason
        member = at.links._members[DECODE]
        assert member.rest_s == 0.2
        await at.until(lambda: member.joined)  # it is used again after its rest
        for before, after in ((0.2, 0.4), (500.0, 600.0)):
            member.rest_s = before
            at.links._rest(member, 1)
            assert member.rest_s == after, "the next rest is longer, up to a limit"


async def test_a_token_ends_the_silence_of_a_worker_and_without_requests_it_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Served() as at:
        look_often(at, monkeypatch, 1000)
        member = at.links._members[DECODE]
        await at.until(lambda: member.silent_s > 0)
        member.rest_s = 5.0
        at.say(a_step(1, 11))
        assert (member.silent_s, member.rest_s) == (0.0, 0.0)
        at.say(a_step(2, 12))
        at.say(a_step(3, 13, "length"))
        await at.client
        at.links._look_for_stalls(1.0)
        assert member.silent_s == 0.0


async def test_time_in_which_the_conductor_stood_still_is_no_silence() -> None:
    async with Served() as at:
        for _ in range(1000):
            at.links._look_for_stalls(1.0)
        assert at.core.decodes_at(R1) == DECODE, "without a limit a worker may take for ever"
    async with Served() as at:
        at.links.decode_stall_s = 60.0
        at.links._look_for_stalls(3600.0)
        assert at.core.decodes_at(R1) == DECODE
        assert at.links._members[DECODE].silent_s == 2.0
