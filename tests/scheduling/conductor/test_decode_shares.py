"""A tenant that floods decode with long prompts or answers makes room for others."""

import pytest

from halfmoon_protocol.ids import RequestId, WorkerId, retry_id
from halfmoon_protocol.messages import (
    Cancel,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    PrefillStopped,
    ReserveDecode,
    StartDecode,
)
from halfmoon_scheduling.commands import AnyCommand, Fail, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker

DECODE, PREFILL = WorkerId("decode-0"), WorkerId("prefill-0")
#: Of a prompt of 160 tokens.
N_PAGES = 10


class Core:
    """A conductor with workers that grant all they are asked for; it audits itself."""

    def __init__(self, **config: bool) -> None:
        self.conductor = Conductor(SchedulingConfig(**config))  # type: ignore[arg-type]
        self.handle(WorkerJoined(a_worker("prefill-0")))
        self.handle(WorkerJoined(a_worker("decode-0")))

    def handle(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.conductor.handle(event, 0.0)
        self.conductor.check()
        return commands

    def arrive(
        self,
        name: str,
        tenant: str,
        *,
        attempt: int = 1,
        fruitless: int = 0,
        priority: int = 0,
        max_new: int = 800,
    ) -> list[AnyCommand]:
        request = a_request(
            name,
            n_tokens=160,
            max_new_tokens=max_new,
            tenant=tenant,
            attempt=attempt,
            fruitless=fruitless,
            priority=priority,
        )
        return self.handle(RequestArrived(request))

    def grant(self, name: str) -> None:
        """Grant its pages, so that its prefill begins."""
        landing = a_landing(DECODE)
        granted = DecodeReserved(request_id=RequestId(name), landing=landing, expires_s=60.0)
        self.handle(MessageReceived(DECODE, granted))

    def run(self, name: str) -> list[AnyCommand]:
        """Grant its pages, prefill it, and start it."""
        self.grant(name)
        commands = self.handle(MessageReceived(PREFILL, a_prefill_done(name)))
        assert any(isinstance(c, Send) and isinstance(c.message, StartDecode) for c in commands)
        return commands

    def flood(self, n: int = 6, *, priority: int = 0) -> None:
        """Fill decode with answers of a tenant."""
        for i in range(n):
            assert reserved(self.arrive(f"flood-{i}", "flood", priority=priority)) == [f"flood-{i}"]
            self.run(f"flood-{i}")

    def flood_prompts(self, *, fruitless: int = 0) -> None:
        """Fill decode with prompts that are being prefilled; the last one is a retry, maybe."""
        names = [f"flood-{i}" for i in range(5)] + [f"flood-5~{fruitless + 1}"]
        for name, n in zip(names, (0, 0, 0, 0, 0, fruitless), strict=True):
            commands = self.arrive(name, "flood", attempt=n + 1, fruitless=n)
            assert reserved(commands) == [name]
            self.grant(name)

    def stop_prefill(self, name: str) -> list[AnyCommand]:
        stopped = PrefillStopped(request_id=RequestId(name))
        return self.handle(MessageReceived(PREFILL, stopped))

    def load(self, free_pages: int) -> list[AnyCommand]:
        load = DecodeLoad(
            n_running=6,
            n_reserved=0,
            context_tokens=960,
            free_pages=free_pages,
            n_pages=64,
            step_s=0.01,
        )
        return self.handle(MessageReceived(DECODE, load))

    def phase(self, name: str) -> Phase | None:
        return self.conductor.phase_of(RequestId(name))


def reserved(commands: list[AnyCommand]) -> list[str]:
    messages = [c.message for c in commands if isinstance(c, Send)]
    return [str(m.request_id) for m in messages if isinstance(m, ReserveDecode)]


def stopped(commands: list[AnyCommand]) -> list[str]:
    """Requests that are cancelled at a worker and placed again."""
    messages = [c.message for c in commands if isinstance(c, Send)]
    again = [str(c.request_id) for c in commands if isinstance(c, Resubmit)]
    assert [str(m.request_id) for m in messages if isinstance(m, Cancel)] == again
    return again


def test_the_newest_answer_of_a_flood_makes_room_for_another_tenant() -> None:
    core = Core()
    core.flood()
    commands = core.arrive("honest", "lab", max_new=8)
    assert stopped(commands) == ["flood-5"]
    assert reserved(commands) == ["honest"]
    kinds = [type(c.message) for c in commands if isinstance(c, Send)]
    assert kinds == [Cancel, ReserveDecode], "the pages are free when they are asked for"


def test_what_was_stopped_waits_behind_the_tenant_and_before_its_own_backlog() -> None:
    core = Core()
    core.flood()
    core.arrive("waits", "flood")
    core.arrive("honest", "lab", max_new=8)
    core.run("honest")
    again = retry_id(RequestId("flood-5"), 2)
    assert not reserved(core.arrive(again, "flood", attempt=2))
    assert reserved(core.handle(RequestFinished(RequestId("honest"), 8))) == [again]
    assert core.phase("waits") is Phase.WAITING


def test_without_another_tenant_nothing_is_stopped() -> None:
    core = Core()
    core.flood()
    commands = core.arrive("one-more", "flood")
    assert commands == []
    assert core.phase("one-more") is Phase.WAITING


def test_tenants_with_about_as_many_requests_do_not_stop_each_other() -> None:
    core = Core()
    for i in range(3):
        for tenant in ("a", "b"):
            core.arrive(f"{tenant}-{i}", tenant)
            core.run(f"{tenant}-{i}")
    assert core.arrive("a-3", "a") == []
    assert core.arrive("b-3", "b") == []


@pytest.mark.parametrize(("n_new", "made_room"), [(800, 0), (3, 1)])
def test_a_tenant_that_has_used_its_share_of_the_queue_waits(n_new: int, made_room: int) -> None:
    """What counts is what its answers took, not what they were allowed."""
    core = Core()
    for i, tenant in enumerate(("other", *120 * ["lab"])):  # the first one has no credit
        core.arrive(f"own-{i}", tenant)
        core.run(f"own-{i}")
        core.handle(RequestFinished(RequestId(f"own-{i}"), n_new))
    core.flood()
    # 115,200 tokens or 19,560, and the credit is 65,536.
    assert len(stopped(core.arrive("late", "lab"))) == made_room


@pytest.mark.parametrize(("of_flood", "of_lab", "made_room"), [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_an_answer_of_higher_priority_goes_on(of_flood: int, of_lab: int, made_room: int) -> None:
    core = Core()
    core.flood(priority=of_flood)
    assert len(stopped(core.arrive("honest", "lab", priority=of_lab, max_new=8))) == made_room


def test_another_answer_is_stopped_only_when_the_worker_has_reported_twice() -> None:
    core = Core()
    core.flood()
    commands = core.arrive("honest", "lab", max_new=8)
    assert len(stopped(commands)) == 1
    full = DecodeRefused(
        request_id=RequestId("honest"), reason="full", retryable=True, retry_after_s=60.0
    )
    assert stopped(core.handle(MessageReceived(DECODE, full))) == []
    assert stopped(core.load(free_pages=0)) == []
    commands = core.load(free_pages=0)
    assert stopped(commands) == ["flood-4"]


def test_the_newest_prompt_of_a_flood_makes_room_when_its_prefill_has_stopped() -> None:
    core = Core()
    core.flood_prompts()
    commands = core.arrive("honest", "lab", max_new=8)
    assert stopped(commands) == ["flood-5~1"]
    assert [c.worker_id for c in commands if isinstance(c, Send)] == [PREFILL]
    assert reserved(commands) == [], "prefill may still write into its pages"
    for _ in range(3):
        assert stopped(core.load(free_pages=0)) == [], "pages are about to come free"
    (freed,) = core.stop_prefill("flood-5~1")
    assert freed == Send(DECODE, Cancel(request_id=RequestId("flood-5~1")))
    assert reserved(core.load(free_pages=N_PAGES + 1)) == ["honest"]


def test_another_prompt_is_stopped_only_after_two_reports_without_the_first_ones_pages() -> None:
    core = Core()
    core.flood_prompts()
    core.arrive("honest", "lab", max_new=8)
    core.load(free_pages=0)
    core.load(free_pages=0)
    core.stop_prefill("flood-5~1")
    full = DecodeRefused(
        request_id=RequestId("honest"), reason="full", retryable=True, retry_after_s=60.0
    )
    assert stopped(core.handle(MessageReceived(DECODE, full))) == []
    assert stopped(core.load(free_pages=0)) == []
    assert stopped(core.load(free_pages=0)) == ["flood-4"]


def test_nothing_is_stopped_where_a_cancelled_prompt_frees_its_pages() -> None:
    core = Core()
    core.flood_prompts()
    core.handle(RequestCancelled(RequestId("flood-2")))
    assert core.arrive("honest", "lab", max_new=8) == []
    assert reserved(core.stop_prefill("flood-2")) == ["honest"]


def test_a_prompt_that_was_stopped_has_not_failed_however_often() -> None:
    core = Core()
    core.flood_prompts(fruitless=SchedulingConfig().max_attempts - 1)
    (again,) = (
        c for c in core.arrive("honest", "lab", max_new=8) if isinstance(c, Resubmit | Fail)
    )
    assert isinstance(again, Resubmit)
    assert not again.counts


def test_a_worker_that_comes_back_has_stopped_nothing() -> None:
    core = Core()
    core.flood()
    core.arrive("honest", "lab", max_new=8)
    core.handle(WorkerLost(DECODE, "gone"))
    core.handle(WorkerJoined(a_worker("decode-0", generation=2)))
    core.flood()
    assert len(stopped(core.arrive("again", "lab", max_new=8))) == 1


def test_it_can_be_switched_off() -> None:
    core = Core(shares_decode=False)
    core.flood()
    assert core.arrive("honest", "lab", max_new=8) == []
