"""Workers change sides, by the loads that the conductor knows or as operators pin them."""

from typing import Any

import msgspec
import pytest

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import ChangeRole, Role
from halfmoon_scheduling.cluster.role_changes import ANSWER_S, RETURN_S
from halfmoon_scheduling.cluster.role_outlook import RoleOutlook, WorkerRole
from halfmoon_scheduling.commands import AnyCommand, Send
from halfmoon_scheduling.events import (
    RequestedRole,
    RoleChangeRequested,
    Tick,
    WorkerJoined,
)
from halfmoon_testing.scheduling_inputs import a_worker
from tests.scheduling.core import Core, prefill_load

BOTH: tuple[Role, ...] = ("prefill", "decode")
Asked = list[tuple[str, Role]]


def asked(commands: list[AnyCommand]) -> Asked:
    return [
        (command.worker_id, command.message.role)
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, ChangeRole)
    ]


class Sides(Core):
    """A conductor, its workers, whose work comes from another one, and an operator."""

    def __init__(self, *workers: str, automatic: bool = False, **fields: Any) -> None:
        limits = {"ttft_slo_s": 1.0, "tbt_slo_s": 0.1}
        super().__init__(**limits, role_changes=automatic, role_lasting_s=20.0, role_rest_s=50.0)
        self.generations: dict[str, int] = {}
        #: When workers were asked to change.
        self.asked_at_s: list[float] = []
        for name in workers or ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            self.comes(name, **{"roles": BOTH, **fields})

    def comes(self, name: str, **fields: Any) -> None:
        generation = fields.setdefault("generation", self.generations.get(name, 0) + 1)
        self.generations[name] = generation
        self.handle(WorkerJoined(msgspec.structs.replace(a_worker(name), **fields)))

    def drain(self, name: str) -> None:
        info = self.conductor.cluster.get(WorkerId(name))
        assert info is not None
        self.handle(WorkerJoined(msgspec.structs.replace(info, draining=True)))

    def obey(self, name: str, role: Role) -> None:
        """Do what a worker does that changes its role."""
        self.drain(name)
        self.lose(name)
        self.comes(name, role=role, roles=BOTH)

    def request(self, name: str, role: RequestedRole) -> Asked:
        assert self.conductor.role_refusal(WorkerId(name), role) is None
        return asked(self.handle(RoleChangeRequested(WorkerId(name), role)))

    def refusal(self, name: str, role: RequestedRole) -> tuple[str, str, str]:
        """Return kind, field and reason of a request that is refused, and changes nothing."""
        refusal = self.conductor.role_refusal(WorkerId(name), role)
        assert refusal is not None
        before = self.outlook()
        assert self.handle(RoleChangeRequested(WorkerId(name), role)) == []
        assert self.outlook() == before
        return refusal.kind, refusal.field, refusal.reason

    def wait(self, seconds: float) -> Asked:
        """Let time pass, with a tick every tenth of a second; return what workers are asked."""
        found: Asked = []
        until_s = self.now + seconds
        while self.now < until_s:
            commands = asked(self.conductor.handle(Tick(), round(self.now + 0.1, 1)))
            self.now = round(self.now + 0.1, 1)
            self.asked_at_s += [self.now] * len(commands)
            found += commands
        self.conductor.check()
        return found

    def load_prefills(self, n_tokens: int = 100_000) -> None:
        for info in self.conductor.cluster.accepting("prefill"):
            self.hear(info.worker_id, prefill_load(n_tokens))

    def load_decodes(self) -> None:
        for info in self.conductor.cluster.accepting("decode"):
            self.load(info.worker_id, free_pages=2, n_running=1, context_tokens=1)

    def outlook(self) -> RoleOutlook:
        return self.conductor.role_outlook(self.now)

    def row(self, name: str) -> WorkerRole:
        (found,) = [each for each in self.outlook().workers if each.worker_id == name]
        return found


# -- an operator's request -----------------------------------------------------------------------


def test_a_worker_changes_as_an_operator_requests_and_stays_pinned() -> None:
    core = Sides()
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
    core.comes("decode-1", role="prefill", roles=BOTH)
    back = core.row("decode-1")
    assert (back.role, back.pinned, back.changing_to) == ("prefill", "prefill", None)
    assert core.outlook().rest_s == 0.0  # the policy is off, so it does not rest
    assert core.wait(100.0) == []


def test_a_worker_can_be_pinned_to_the_role_that_it_has_but_once() -> None:
    core = Sides()
    assert core.request("decode-1", "decode") == []
    row = core.row("decode-1")
    assert (row.role, row.pinned, row.changing_to) == ("decode", "decode", None)
    kind, field, reason = core.refusal("decode-1", "decode")
    assert (kind, field) == ("conflict", "role")
    assert "'decode'" in reason and "'auto'" in reason, "the way to release it is said"


@pytest.mark.parametrize("released_to", ["auto", "decode"])
def test_a_pinned_worker_that_refuses_is_asked_again_until_it_is_released(
    released_to: RequestedRole,
) -> None:
    core = Sides()
    core.request("decode-1", "prefill")
    assert core.wait(2.5 * ANSWER_S) == [("decode-1", "prefill")] * 2
    assert core.row("decode-1").n_asked == 3
    assert core.request("decode-1", released_to) == []
    assert core.wait(2.5 * ANSWER_S) == []
    row = core.row("decode-1")
    assert (row.pinned, row.changing_to) == (None if released_to == "auto" else "decode", None)


def test_a_pinned_worker_that_starts_again_in_its_first_role_is_asked_again() -> None:
    core = Sides()
    core.request("decode-1", "prefill")
    core.obey("decode-1", "prefill")
    core.lose("decode-1")
    core.wait(1.0)
    core.comes("decode-1", role="decode", roles=BOTH)
    assert core.wait(1.0) == [("decode-1", "prefill")]


def test_a_pinned_worker_is_not_asked_while_it_is_the_last_of_its_role() -> None:
    core = Sides()
    core.request("decode-1", "prefill")
    core.obey("decode-1", "prefill")
    core.lose("decode-1")
    core.comes("decode-1", role="decode", roles=BOTH)
    core.lose("decode-0")
    assert core.wait(3 * ANSWER_S) == []
    core.comes("decode-0", roles=BOTH)
    assert core.wait(1.0) == [("decode-1", "prefill")]


def test_a_worker_that_never_comes_back_is_not_expected_for_ever() -> None:
    core = Sides()
    core.request("decode-1", "prefill")
    core.lose("decode-1")
    core.request("decode-1", "auto")
    core.wait(1.0)
    assert core.row("decode-1").changing_to == "prefill"
    core.wait(RETURN_S)
    assert "decode-1" not in {each.worker_id for each in core.outlook().workers}


# -- requests that are refused -------------------------------------------------------------------


def test_an_unknown_worker_is_refused() -> None:
    kind, field, reason = Sides().refusal("decode-7" + "x" * 500, "prefill")
    assert (kind, field) == ("unknown", "worker_id")
    assert "'decode-7xxx" in reason and "halfmoon roles" in reason and len(reason) < 200


@pytest.mark.parametrize("role", ["prefill", "decode", "auto"])
@pytest.mark.parametrize("name", ["decode-2", "kvstore-0"])
def test_a_worker_of_one_role_is_refused_with_the_flag_that_helps(
    name: str, role: RequestedRole
) -> None:
    core = Sides()
    core.comes(name)
    kind, field, reason = core.refusal(name, role)
    assert (kind, field) == ("invalid", "worker_id")
    assert name in reason and "--roles prefill,decode" in reason


def test_what_would_change_nothing_or_leave_no_worker_is_refused_with_the_reason() -> None:
    kind, field, reason = Sides().refusal("decode-1", "auto")
    assert (kind, field) == ("conflict", "role")
    assert "pinned to no role" in reason
    core = Sides()
    core.drain("decode-1")
    kind, field, reason = core.refusal("decode-1", "prefill")
    assert (kind, field) == ("conflict", "worker_id")
    assert "draining" in reason
    core = Sides("prefill-0", "decode-0", "decode-1")
    kind, field, reason = core.refusal("prefill-0", "decode")
    assert (kind, field) == ("conflict", "role")
    assert "the last prefill worker" in reason and "start another one" in reason
    core.request("decode-0", "prefill")  # two requests at once leave one worker
    assert core.refusal("decode-1", "prefill")[:2] == ("conflict", "role")


@pytest.mark.parametrize("phase", ["asked", "draining", "away"])
def test_a_worker_that_is_changing_is_refused_until_it_is_back(phase: str) -> None:
    core = Sides()
    core.request("decode-1", "prefill")
    if phase != "asked":
        core.drain("decode-1")
    if phase == "away":
        core.lose("decode-1")
    kind, field, reason = core.refusal("decode-1", "decode")
    assert (kind, field) == ("conflict", "worker_id")
    assert "is changing to prefill" in reason
    core.comes("decode-1", role="prefill", roles=BOTH)
    assert core.request("decode-1", "decode") == [("decode-1", "decode")]


# -- the policy ----------------------------------------------------------------------------------

FIVE = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")


def test_a_worker_of_the_idle_side_is_told_and_then_there_is_a_rest() -> None:
    core = Sides(*FIVE, automatic=True)
    core.load_prefills()
    assert core.wait(100.0) == [("decode-0", "prefill")] * 2
    first_s, second_s = core.asked_at_s
    assert first_s >= 20.0 and second_s >= first_s + 50.0


def test_decode_is_busy_when_its_pages_are_gone_though_steps_are_short() -> None:
    core = Sides(*FIVE, automatic=True)
    core.load_decodes()
    assert core.wait(40.0) == [("prefill-0", "decode")]


@pytest.mark.parametrize(
    ("local_tokens", "spared"), [(0, True), (4095, True), (4096, False)]
)  # the longest context is 4,096 tokens
def test_prefill_workers_with_work_are_spared_unless_decode_workers_take_any_prompt(
    local_tokens: int, spared: bool
) -> None:
    core = Sides(*FIVE, automatic=True, local_prefill_tokens=local_tokens)
    core.load_prefills(1)
    core.wait(60.0)  # long enough to be known as busy; nobody is short of workers
    core.load_decodes()
    assert {role for _, role in core.wait(60.0)} == (set() if spared else {"decode"})
    core.load_prefills(0)
    assert {role for _, role in core.wait(120.0)} == {"decode"}


def test_who_is_on_the_way_out_belongs_to_no_side_and_who_is_back_to_its_new_one() -> None:
    core = Sides(*FIVE, automatic=True)
    core.load_prefills()
    ((leaver, _),) = core.wait(40.0)
    core.drain(leaver)
    ((next_one, _),) = core.wait(60.0)
    assert next_one not in (leaver, "prefill-0", "prefill-1")
    core.obey(leaver, "prefill")
    there = {info.worker_id for info in core.conductor.cluster.accepting("prefill")}
    assert there == {"prefill-0", "prefill-1", leaver}


# -- operators and the policy --------------------------------------------------------------------


def test_the_policy_does_not_undo_what_an_operator_has_done() -> None:
    core = Sides("decode-0", "decode-1", "decode-2", automatic=True)
    core.comes("prefill-0")
    core.request("decode-0", "prefill")
    core.obey("decode-0", "prefill")
    core.load_decodes()
    assert core.wait(200.0) == []
    core.request("decode-0", "auto")
    assert core.wait(30.0) == [("decode-0", "decode")]


def test_the_policy_rests_after_an_operator_has_changed_a_role() -> None:
    core = Sides("prefill-0", "decode-0", "decode-1", "decode-2", automatic=True)
    core.request("decode-0", "prefill")
    core.obey("decode-0", "prefill")
    core.load_prefills()
    assert core.wait(45.0) == []
    assert core.wait(30.0) == [("decode-1", "prefill")]


def test_the_policy_does_not_take_the_last_worker_while_another_one_leaves() -> None:
    core = Sides("prefill-0", "decode-0", "decode-1", automatic=True)
    core.load_prefills()
    core.wait(15.0)
    core.request("decode-0", "prefill")
    assert ("decode-1", "prefill") not in core.wait(100.0)


# -- the outlook ---------------------------------------------------------------------------------


def test_the_outlook_says_what_the_policy_does_next_and_when() -> None:
    core = Sides(automatic=True)
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
    core = Sides(*names, automatic=kept != "off")
    if kept in ("pinned", "one role"):
        core.comes("decode-1", roles=BOTH if kept == "pinned" else ())
    if kept == "one role":
        core.comes("decode-0", roles=())
    if kept == "pinned":
        core.request("decode-0", "decode")
        core.request("decode-1", "decode")
    core.load_prefills()
    assert core.wait(60.0) == []
    outlook = core.outlook()
    assert outlook.next is None
    assert reason in outlook.reason
    assert outlook.automatic == (kept != "off")
