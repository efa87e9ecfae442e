"""What an exception in the scheduling core costs, wherever its event was posted."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from halfmoon_conductor.workers.shell import CoreBroken, Shell
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_runtime.clock import FakeClock
from halfmoon_runtime.worker.message_loop import FAILED_MESSAGES
from halfmoon_scheduling.commands import AnyCommand, Deliver, Fail
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_prefill_done, a_request, a_worker

R1, R2 = RequestId("cmpl-1"), RequestId("cmpl-2")


class Clients:
    """What clients are told."""

    def __init__(self) -> None:
        self.failed: list[Fail] = []
        self.delivered: list[RequestId] = []
        self.raises_for: RequestId | None = None

    def fail(self, command: Fail) -> None:
        self.failed.append(command)

    def deliver(self, request_id: RequestId, token: int, finish: str, n_cached: int = 0) -> bool:
        if request_id == self.raises_for:
            raise RuntimeError("no such client")
        self.delivered.append(request_id)
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class FlawedCore(Conductor):
    """A core with a bug in one event, which may leave half of it behind."""

    def __init__(self, flaw: type) -> None:
        super().__init__(SchedulingConfig())
        self.flaw = flaw
        self.handled: list[AnyEvent] = []
        self.says: list[AnyCommand] = []
        self.is_sound = True

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        self.handled.append(event)
        if isinstance(event, self.flaw):
            raise KeyError("a bug")
        said, self.says = self.says, []
        return super().handle(event, now) + said

    def check(self) -> None:
        super().check()
        assert self.is_sound, "half an event is left"


@pytest.fixture
def clients() -> Clients:
    return Clients()


def shell_of(core: FlawedCore, clients: Clients) -> Shell:
    shell = Shell(core, FakeClock())
    shell.connect(clients, clients)
    return shell


@pytest.mark.parametrize(
    "event",
    [RequestArrived(a_request(R1)), MessageReceived(WorkerId("prefill-0"), a_prefill_done(R1))],
    ids=["its arrival", "a message about it"],
)
def test_an_exception_ends_the_request_whose_event_it_was(
    clients: Clients, event: AnyEvent
) -> None:
    core = FlawedCore(type(event))
    shell = shell_of(core, clients)
    with capture_logs() as logs:
        shell.post(event)
    assert [(each.request_id, each.invalid) for each in clients.failed] == [(R1, False)]
    assert core.handled[-1] == RequestCancelled(R1), "the core forgets it"
    assert [entry["event"] for entry in logs] == ["core_failed"]
    assert not shell.broken.is_set()
    shell.post(WorkerJoined(a_worker("prefill-0")))
    assert WorkerId("prefill-0") in core.cluster


OF_NONE = [Tick(), WorkerLost(WorkerId("decode-0"), "gone"), RequestCancelled(R1)]


@pytest.mark.parametrize("event", OF_NONE, ids=str)
def test_an_event_of_no_request_ends_none(clients: Clients, event: AnyEvent) -> None:
    core = FlawedCore(type(event))
    shell = shell_of(core, clients)
    before = FAILED_MESSAGES.labels(type(event).__name__)._value.get()
    shell.post(event)
    assert not clients.failed
    assert core.handled == [event]
    assert shell.n_failures == 1
    assert FAILED_MESSAGES.labels(type(event).__name__)._value.get() == before + 1


async def test_a_core_that_fails_its_audit_ends_the_process_with_its_story(
    clients: Clients,
) -> None:
    core = FlawedCore(Tick)
    shell = shell_of(core, clients)
    ending = asyncio.create_task(shell.until_broken())
    shell.post(RequestArrived(a_request(R2)))
    core.is_sound = False
    with capture_logs() as logs:
        shell.post(Tick())
    with pytest.raises(CoreBroken):
        await ending
    shell.post(WorkerJoined(a_worker("prefill-0")))
    assert WorkerId("prefill-0") not in core.cluster, "it decides nothing any more"
    story = next(entry for entry in logs if entry["event"] == "core_broken")
    assert story["latest_events"] == [f"RequestArrived {R2}", "Tick"]


def test_a_command_that_fails_keeps_no_other_from_being_carried_out(clients: Clients) -> None:
    core = FlawedCore(type(None))
    shell = shell_of(core, clients)
    clients.raises_for = R1
    core.says = [Deliver(R1, 5, "", 0), Deliver(R2, 6, "", 0)]
    shell.post(Tick())
    assert clients.delivered == [R2]
    assert [each.request_id for each in clients.failed] == [R1]
    assert core.handled[-1] == RequestCancelled(R1)
