"""Operators pin workers to roles; the policy leaves pinned workers alone."""

import io
from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import ChangeRole, DecodeLoad, PrefillLoad, Role, WorkerInfo
from halfmoon_scheduling.cluster.role_changes import ANSWER_S, RETURN_S
from halfmoon_scheduling.cluster.role_outlook import RoleOutlook, WorkerRole
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.journal import encode_entry, encode_header, replay_journal
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    RequestedRole,
    RoleChangeRequested,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_testing.scheduling_inputs import a_worker

BOTH: tuple[Role, ...] = ("prefill", "decode")
Asked = list[tuple[str, Role]]


def asked(commands: list[AnyCommand]) -> Asked:
    return [
        (command.worker_id, command.message.role)
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, ChangeRole)
    ]


class Core:
    """A conductor, its workers, and an operator."""

    def __init__(self, *workers: str, automatic: bool = False) -> None:
        self.now = 0.0
        self.core = Conductor(
            SchedulingConfig(
                ttft_slo_s=1.0,
                tbt_slo_s=0.1,
                role_changes=automatic,
                role_lasting_s=20.0,
                role_rest_s=50.0,
            )
        )
        self.generations: dict[str, int] = {}
        for name in workers or ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            self.join(name, roles=BOTH)

    def join(self, name: str, **fields: Any) -> WorkerInfo:
        generation = fields.setdefault("generation", self.generations.get(name, 0) + 1)
        self.generations[name] = generation
        info = msgspec.structs.replace(a_worker(name), **fields)
        self.core.handle(WorkerJoined(info), self.now)
        return info

    def drain(self, name: str) -> None:
        info = self.core.cluster.get(WorkerId(name))
        assert info is not None
        draining = msgspec.structs.replace(info, draining=True)
        self.core.handle(WorkerJoined(draining), self.now)

    def lose(self, name: str) -> None:
        self.core.handle(WorkerLost(WorkerId(name), "its lease is over"), self.now)

    def obey(self, name: str, role: Role) -> None:
        """Do what a worker does that changes its role."""
        self.drain(name)
        self.lose(name)
        self.join(name, role=role, roles=BOTH)

    def request(self, name: str, role: RequestedRole) -> Asked:
        assert self.core.role_refusal(WorkerId(name), role) is None
        return asked(self.core.handle(RoleChangeRequested(WorkerId(name), role), self.now))

    def refusal(self, name: str, role: RequestedRole) -> tuple[str, str, str]:
        """Return kind, field and reason of a request that is refused, and changes nothing."""
        refusal = self.core.role_refusal(WorkerId(name), role)
        assert refusal is not None
        before = self.core.role_outlook(self.now)
        assert self.core.handle(RoleChangeRequested(WorkerId(name), role), self.now) == []
        assert self.core.role_outlook(self.now) == before
        return refusal.kind, refusal.field, refusal.reason

    def wait(self, seconds: float) -> Asked:
        """Let time pass, with a tick every tenth of a second; return what workers are asked."""
        found: Asked = []
        until_s = self.now + seconds
        while self.now < until_s:
            self.now = round(self.now + 0.1, 1)
            found += asked(self.core.handle(Tick(), self.now))
        self.core.check()
        return found

    def load_prefills(self, n_tokens: int = 100_000) -> None:
        for info in self.core.cluster.accepting("prefill"):
            load = PrefillLoad(n_queued=1, queued_tokens=n_tokens, free_pages=1, n_pages=1)
            self.core.handle(MessageReceived(info.worker_id, load), self.now)

    def load_decodes(self) -> None:
        for info in self.core.cluster.accepting("decode"):
            load = DecodeLoad(
                n_running=1, n_reserved=0, context_tokens=1, free_pages=2, n_pages=64, step_s=0.0
            )
            self.core.handle(MessageReceived(info.worker_id, load), self.now)

    def outlook(self) -> RoleOutlook:
        return self.core.role_outlook(self.now)

    def row(self, name: str) -> WorkerRole:
        (found,) = [each for each in self.outlook().workers if each.worker_id == name]
        return found


# -- an operator's request -----------------------------------------------------------------------


def test_a_worker_changes_as_an_operator_requests_and_stays_pinned() -> None:
    core = Core()
    assert core.request("decode-1", "prefill") == [("decode-1", "prefill")]
    row = core.row("decode-1")
    assert (row.role, row.pinned, row.changing_to, row.has_begun) == (
        "decode", "prefill", "prefill", False,
    )  # fmt: skip
    core.drain("decode-1")
    assert core.row("decode-1").has_begun
    core.lose("decode-1")
    away = core.row("decode-1")
    assert (away.role, away.pinned, away.changing_to, away.load) == (
        None, "prefill", "prefill", None,
    )  # fmt: skip
    core.join("decode-1", role="prefill", roles=BOTH)
    back = core.row("decode-1")
    assert (back.role, back.pinned, back.changing_to) == ("prefill", "prefill", None)
    assert core.outlook().rest_s == 0.0  # the policy is off, so it does not rest
    assert core.wait(100.0) == []


def test_a_worker_can_be_pinned_to_the_role_that_it_has() -> None:
    core = Core()
    assert core.request("decode-1", "decode") == []
    row = core.row("decode-1")
    assert (row.role, row.pinned, row.changing_to) == ("decode", "decode", None)


def test_a_pinned_worker_that_refuses_is_asked_again_until_it_is_released() -> None:
    core = Core()
    core.request("decode-1", "prefill")
    assert core.wait(2.5 * ANSWER_S) == [("decode-1", "prefill")] * 2
    assert core.row("decode-1").n_asked == 3
    core.request("decode-1", "auto")
    assert core.wait(2.5 * ANSWER_S) == []
    row = core.row("decode-1")
    assert (row.pinned, row.changing_to) == (None, None)


def test_a_pinned_worker_that_starts_again_in_its_first_role_is_asked_again() -> None:
    core = Core()
    core.request("decode-1", "prefill")
    core.obey("decode-1", "prefill")
    core.lose("decode-1")
    core.wait(1.0)
    core.join("decode-1", role="decode", roles=BOTH)
    assert core.wait(1.0) == [("decode-1", "prefill")]


def test_a_pinned_worker_is_not_asked_while_it_is_the_last_of_its_role() -> None:
    core = Core()
    core.request("decode-1", "prefill")
    core.obey("decode-1", "prefill")
    core.lose("decode-1")
    core.join("decode-1", role="decode", roles=BOTH)
    core.lose("decode-0")
    assert core.wait(3 * ANSWER_S) == []
    core.join("decode-0", roles=BOTH)
    assert core.wait(1.0) == [("decode-1", "prefill")]


def test_a_worker_that_never_comes_back_is_not_expected_for_ever() -> None:
    core = Core()
    core.request("decode-1", "prefill")
    core.lose("decode-1")
    core.request("decode-1", "auto")
    core.wait(1.0)
    assert core.row("decode-1").changing_to == "prefill"
    core.wait(RETURN_S)
    assert "decode-1" not in {each.worker_id for each in core.outlook().workers}


def test_a_journal_with_requests_for_roles_replays_to_the_same_commands() -> None:
    core = Conductor(SchedulingConfig())
    journal = [encode_header(core.config)]
    events: list[AnyEvent] = [
        *(
            WorkerJoined(msgspec.structs.replace(a_worker(name), roles=BOTH))
            for name in ("prefill-0", "decode-0", "decode-1")
        ),
        RoleChangeRequested(WorkerId("decode-1"), "prefill"),
        Tick(),
        RoleChangeRequested(WorkerId("decode-0"), "prefill"),
        RoleChangeRequested(WorkerId("decode-1"), "auto"),
        Tick(),
    ]
    asked_for: Asked = []
    for number, event in enumerate(events):
        commands = core.handle(event, 8.0 * number)
        asked_for += asked(commands)
        journal.append(encode_entry(8.0 * number, event, commands))
    assert asked_for == [("decode-1", "prefill")]
    assert replay_journal(io.BytesIO(b"".join(journal))) == (len(events), None)


# -- requests that are refused -------------------------------------------------------------------


def test_an_unknown_worker_is_refused() -> None:
    kind, field, reason = Core().refusal("decode-7" + "x" * 500, "prefill")
    assert (kind, field) == ("unknown", "worker_id")
    assert "'decode-7xxx" in reason and "halfmoon roles" in reason and len(reason) < 200


@pytest.mark.parametrize("role", ["prefill", "decode", "auto"])
@pytest.mark.parametrize("name", ["decode-2", "kvstore-0"])
def test_a_worker_of_one_role_is_refused_with_the_flag_that_helps(
    name: str, role: RequestedRole
) -> None:
    core = Core()
    core.join(name)
    kind, field, reason = core.refusal(name, role)
    assert (kind, field) == ("invalid", "worker_id")
    assert name in reason and "--roles prefill,decode" in reason


def test_the_role_of_the_pin_is_refused_with_the_way_to_release_it() -> None:
    core = Core()
    core.request("decode-1", "decode")
    kind, field, reason = core.refusal("decode-1", "decode")
    assert (kind, field) == ("conflict", "role")
    assert "'decode'" in reason and "'auto'" in reason


def test_auto_is_refused_for_a_worker_without_a_pin() -> None:
    kind, field, reason = Core().refusal("decode-1", "auto")
    assert (kind, field) == ("conflict", "role")
    assert "pinned to no role" in reason


@pytest.mark.parametrize("phase", ["asked", "draining", "away"])
def test_a_worker_that_is_changing_is_refused_until_it_is_back(phase: str) -> None:
    core = Core()
    core.request("decode-1", "prefill")
    if phase != "asked":
        core.drain("decode-1")
    if phase == "away":
        core.lose("decode-1")
    kind, field, reason = core.refusal("decode-1", "decode")
    assert (kind, field) == ("conflict", "worker_id")
    assert "is changing to prefill" in reason
    core.join("decode-1", role="prefill", roles=BOTH)
    assert core.request("decode-1", "decode") == [("decode-1", "decode")]


def test_a_worker_that_is_about_to_leave_is_refused() -> None:
    core = Core()
    core.drain("decode-1")
    kind, field, reason = core.refusal("decode-1", "prefill")
    assert (kind, field) == ("conflict", "worker_id")
    assert "draining" in reason


def test_the_last_worker_of_a_role_is_refused() -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    kind, field, reason = core.refusal("prefill-0", "decode")
    assert (kind, field) == ("conflict", "role")
    assert "the last prefill worker" in reason and "start another one" in reason


def test_two_requests_at_once_leave_one_worker() -> None:
    core = Core("prefill-0", "decode-0", "decode-1")
    core.request("decode-0", "prefill")
    assert core.refusal("decode-1", "prefill")[:2] == ("conflict", "role")


def test_a_worker_that_refused_before_can_be_pinned_to_its_present_role() -> None:
    core = Core()
    core.request("decode-1", "prefill")
    core.wait(ANSWER_S + 1.0)
    assert core.request("decode-1", "decode") == []
    assert core.wait(3 * ANSWER_S) == []
    assert core.row("decode-1").changing_to is None


# -- operators and the policy --------------------------------------------------------------------


def test_the_policy_leaves_pinned_workers_alone() -> None:
    core = Core(automatic=True)
    core.request("decode-0", "decode")
    core.load_prefills()
    assert core.wait(30.0) == [("decode-1", "prefill")]


def test_the_policy_does_not_undo_what_an_operator_has_done() -> None:
    core = Core("decode-0", "decode-1", "decode-2", automatic=True)
    core.join("prefill-0")
    core.request("decode-0", "prefill")
    core.obey("decode-0", "prefill")
    core.load_decodes()
    assert core.wait(200.0) == []
    core.request("decode-0", "auto")
    assert core.wait(30.0) == [("decode-0", "decode")]


def test_the_policy_rests_after_an_operator_has_changed_a_role() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", "decode-2", automatic=True)
    core.request("decode-0", "prefill")
    core.obey("decode-0", "prefill")
    core.load_prefills()
    assert core.wait(45.0) == []
    assert core.wait(30.0) == [("decode-1", "prefill")]


def test_the_policy_does_not_take_the_last_worker_while_another_one_leaves() -> None:
    core = Core("prefill-0", "decode-0", "decode-1", automatic=True)
    core.load_prefills()
    core.wait(15.0)
    core.request("decode-0", "prefill")
    assert ("decode-1", "prefill") not in core.wait(100.0)


# -- the outlook ---------------------------------------------------------------------------------


def test_the_outlook_says_what_the_policy_does_next_and_when() -> None:
    core = Core(automatic=True)
    assert core.outlook().next is None
    assert "no side has a load of 0.8" in core.outlook().reason
    core.load_prefills()
    core.wait(5.0)
    outlook = core.outlook()
    assert outlook.next is not None
    assert (outlook.next.worker_id, outlook.next.to) == ("decode-0", "prefill")
    assert outlook.next.due_s == pytest.approx(15.9, abs=1.0)
    assert outlook.pools["prefill"].load > 1.0 and outlook.pools["prefill"].n_workers == 2
    assert "prefill has had a load of" in outlook.reason
    due_s = outlook.next.due_s
    assert core.wait(due_s - 1.5) == []
    assert core.wait(3.0) == [("decode-0", "prefill")]
    assert core.outlook().rest_s == pytest.approx(49.0, abs=3.0)


def test_the_outlook_changes_nothing() -> None:
    watched, other = Core(automatic=True), Core(automatic=True)
    for core in (watched, other):
        core.load_prefills()
    found = []
    for _ in range(100):
        watched.outlook()
        found.append((watched.wait(1.0), other.wait(1.0)))
        watched.outlook()
    assert [one for one, _ in found] == [two for _, two in found]
    assert any(one for one, _ in found)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ("last worker", "decode has 1 and keeps 1"),
        ("pinned", "no decode worker may change"),
        ("one role", "no decode worker may change"),
        ("off", "role_changes is off"),
    ],
)
def test_the_outlook_says_why_no_worker_changes(kept: str, reason: str) -> None:
    names = ["prefill-0", "prefill-1", "decode-0"]
    core = Core(*names, automatic=kept != "off")
    if kept in ("pinned", "one role"):
        core.join("decode-1", roles=BOTH if kept == "pinned" else ())
    if kept == "one role":
        core.join("decode-0", roles=())
    if kept == "pinned":
        core.request("decode-0", "decode")
        core.request("decode-1", "decode")
    core.load_prefills()
    core.wait(60.0)
    outlook = core.outlook()
    assert outlook.next is None
    assert reason in outlook.reason
    assert outlook.automatic == (kept != "off")
