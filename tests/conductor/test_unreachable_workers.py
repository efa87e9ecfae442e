"""Workers that are registered and out of the conductor's reach: where and how this is said."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from halfmoon_conductor.page.cluster_view import ConductorInfo, cluster_view
from halfmoon_conductor.workers import unreachable_workers
from halfmoon_conductor.workers.unreachable_workers import UNREACHABLE_S, UnreachableWorkers
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Hello, Welcome, WorkerInfo
from halfmoon_runtime.channels.network import Port
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.channels.zmq_sockets import SocketSettings
from halfmoon_runtime.clock import FakeClock, SystemClock
from halfmoon_runtime.membership import MEMBERS
from halfmoon_testing.scheduling_inputs import a_worker
from tests.conductor.fronts import COMPLETIONS, Front
from tests.conductor.watched_core import LinkedCore, WatchedCore

DECODE = WorkerId("decode-0")


def worker_at(address: str, name: str = DECODE, **changes: Any) -> WorkerInfo:
    return msgspec.structs.replace(a_worker(name), commands=address, events=address, **changes)


class Linked(LinkedCore):
    """Worker links over real sockets, with the records that a test writes."""

    def __init__(self, network: ZmqNetwork) -> None:
        super().__init__(network, SystemClock())
        self.shell.add_recorder(self.observer.record)

    def write(self, info: WorkerInfo) -> None:
        self.store.put(MEMBERS + info.worker_id, msgspec.json.encode(info))

    async def reason(self, matching: str, name: WorkerId = DECODE) -> str:
        """The reason that is given for a worker, once it has this text."""

        def now() -> str:
            found = self.unreachable.found()
            return "".join(each.reason for each in found if each.info.worker_id == name)

        await self.until(lambda: matching in now())
        return now()

    def view(self) -> dict[str, Any]:
        return cluster_view(self.observer, self.links, ConductorInfo("conductor-0"), 0.0)

    def named(self, field: str) -> list[str]:
        return [each["worker_id"] for each in self.view()[field]]


Open = Callable[..., Any]


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(unreachable_workers, "UNREACHABLE_S", 0.0)

    @asynccontextmanager
    async def opened(key: str = "") -> AsyncIterator[Linked]:
        network = ZmqNetwork(SocketSettings(connect_timeout_s=0.2), cluster_key=key)
        here = Linked(network)
        task = asyncio.create_task(here.links.run())
        try:
            yield here
        finally:
            task.cancel()
            await asyncio.wait([task])
            await network.close()

    return opened


class Worker:
    """The port of decode-0, which answers hellos if it is to."""

    def __init__(self, port: Port, answers: bool, generation: int) -> None:
        self.port, self.answers = port, answers
        self.info = msgspec.structs.replace(
            a_worker(DECODE, generation=generation), commands=port.commands, events=port.events
        )

    async def serve(self) -> None:
        while True:
            peer, message = await self.port.receive()
            if self.answers and isinstance(message, Hello):
                await self.port.send(peer, Welcome(worker=self.info))


@asynccontextmanager
async def a_decode_worker(
    *, key: str = "", answers: bool = True, generation: int = 1
) -> AsyncIterator[Worker]:
    network = ZmqNetwork(cluster_key=key)
    worker = Worker(await network.bind(DECODE), answers, generation)
    serving = asyncio.create_task(worker.serve())
    yield worker
    serving.cancel()
    await network.close()


# -- reasons -------------------------------------------------------------------------------------


async def test_an_address_that_refuses_is_named_with_the_reason_until_it_answers(
    linked: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    # A port that refuses connections for as long as nothing else takes it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        lost = worker_at(f"tcp://127.0.0.1:{server.getsockname()[1]}")
    async with linked() as here:
        here.write(lost)
        assert lost.commands in await here.reason("connection refused")
        [shown] = here.view()["unreachable"]
        assert (shown["worker_id"], shown["address"]) == (DECODE, lost.commands)
        assert "--advertise-host" in shown["advice"]
        assert shown["for_s"] >= 0
        said: list[str] = []

        def is_logged() -> bool:
            said.append(capsys.readouterr().out)
            return "worker_unreachable" in "".join(said)

        await here.until(is_logged)
        async with a_decode_worker(generation=2) as there:
            here.write(there.info)
            await here.until(lambda: DECODE in here.core.cluster)
            assert here.view()["unreachable"] == []


async def test_a_name_that_is_not_known_here_is_named(linked: Open) -> None:
    async with linked() as here:
        here.write(worker_at("tcp://no-such-host.invalid:5"))
        await here.reason("the name no-such-host.invalid is not known here")


async def test_a_process_that_takes_connections_and_says_nothing_is_named(linked: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with linked() as here:
            here.write(worker_at(f"tcp://127.0.0.1:{silent.getsockname()[1]}"))
            await here.reason("takes connections, and ends no handshake")


@pytest.mark.parametrize("says_its_key", [True, False])
async def test_another_cluster_key_is_named_with_its_way_out(
    linked: Open, says_its_key: bool
) -> None:
    blue, green = (f"the moon is made of {colour} cheese" for colour in ("blue", "green"))
    async with linked(green) as here, a_decode_worker(key=blue) as there:
        key_id = there.port.key_id if says_its_key else ""
        here.write(msgspec.structs.replace(there.info, key_id=key_id))
        await here.reason("cluster key")
        [found] = here.unreachable.found()
        assert "HALFMOON_CLUSTER_KEY_FILE" in found.advice
        assert "--advertise-host" not in found.advice


async def test_a_worker_that_does_not_answer_the_hello_is_named(linked: Open) -> None:
    async with linked() as here, a_decode_worker(answers=False) as there:
        here.write(there.info)
        await here.reason("does not answer the hello")


async def test_two_workers_that_advertise_one_address_are_told_apart(linked: Open) -> None:
    async with linked() as here, a_decode_worker() as there:
        here.write(there.info)
        here.write(msgspec.structs.replace(there.info, worker_id=WorkerId("decode-1")))
        await here.reason("another worker answers there: decode-0", WorkerId("decode-1"))
        assert DECODE in here.core.cluster


async def test_a_lost_worker_is_unreachable_and_not_gone_while_its_record_lives(
    linked: Open,
) -> None:
    async with linked() as here:
        async with a_decode_worker() as there:
            here.write(there.info)
            await here.until(lambda: DECODE in here.core.cluster)
        await here.reason("connection")
        assert (here.named("unreachable"), here.named("gone")) == ([DECODE], [])
        here.store.delete(MEMBERS + DECODE)
        await here.until(lambda: not here.unreachable.found())
        assert here.named("gone") == [DECODE]


# -- what is noted -------------------------------------------------------------------------------


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def noted(clock: FakeClock) -> UnreachableWorkers:
    return UnreachableWorkers(clock.now)


def fail(noted: UnreachableWorkers, name: str, reason: str = "connection refused") -> None:
    noted.on_dial(worker_at("tcp://127.0.0.1:5", name))
    noted.on_failure(WorkerId(name), reason)


def test_a_worker_counts_as_unreachable_only_after_some_seconds(
    noted: UnreachableWorkers, clock: FakeClock
) -> None:
    fail(noted, DECODE)
    assert noted.found() == []
    clock.advance(UNREACHABLE_S)
    fail(noted, DECODE, "no route to host")
    [found] = noted.found()
    assert (found.reason, found.for_s) == ("no route to host", UNREACHABLE_S)
    _, values = noted.metrics()["halfmoon_unreachable_workers"]
    assert "1" in str(values) and "decode" in str(values)


def test_the_log_says_it_once_then_rarely_and_says_when_it_is_over(
    noted: UnreachableWorkers, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(noted, DECODE)
    for _ in range(100):
        clock.advance(1.0)
        fail(noted, DECODE)
        noted.log_new()
    said = capsys.readouterr().out
    assert said.count("worker_unreachable") == 1
    assert "tcp://127.0.0.1:5" in said and "--advertise-host" in said
    clock.advance(1000)
    noted.log_new()
    assert capsys.readouterr().out.count("worker_unreachable") == 1
    noted.on_reached(DECODE)
    assert "worker_reachable_again" in capsys.readouterr().out
    noted.on_reached(DECODE)
    assert capsys.readouterr().out == ""


def test_the_hint_names_a_few_workers_of_the_roles_and_counts_the_others(
    noted: UnreachableWorkers, clock: FakeClock
) -> None:
    for index in range(5):
        fail(noted, f"decode-{index}", "r" * 10_000)
    clock.advance(UNREACHABLE_S)
    hint = noted.hint(("decode",))
    assert "decode-0 at tcp://127.0.0.1:5" in hint and "2 more" in hint
    assert "decode-4" not in hint and len(hint) < 3000
    assert noted.hint(("prefill",)) == ""


# -- what clients and probes are told ------------------------------------------------------------


def test_a_request_for_which_a_worker_is_out_of_reach_says_so() -> None:
    here = WatchedCore()
    assert here.gateway.missing_hint() == ""
    fail(here.unreachable, DECODE)
    here.clock.advance(UNREACHABLE_S)
    assert "decode-0 at tcp://127.0.0.1:5 (connection refused)" in here.gateway.missing_hint()
    error = here.gateway._unavailable("no live decode worker", 1.0)
    assert str(error).startswith("no live decode worker. Registered, but out of")


async def test_ready_and_the_first_refusal_give_the_reason(front: Front) -> None:
    hint = "Registered, but out of the conductor's reach: decode-0 at tcp://there:1 (x)."
    front.gateway.card, front.gateway.roles_missing, front.gateway.hint = None, ["decode"], hint
    answer = await front.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, hint)
    message = (await front.error(COMPLETIONS, 503))["message"]
    assert message.startswith("No model is served yet") and hint in message
