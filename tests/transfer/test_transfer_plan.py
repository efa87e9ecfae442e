"""The plan decides without sockets: facts in, commands out."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from halfmoon_protocol.regions import Region
from halfmoon_transfer.interface import Cancelled, Corrupted, Lost, Piece, Rejected, Untrusted
from halfmoon_transfer.planning.transfer_plan import (
    APPLIED,
    Batch,
    CarryBatch,
    FinishTransfer,
    OutcomeKind,
    OutgoingNotification,
    PeerKey,
    PlanCommand,
    PlanLimits,
    ResolvePeer,
    SliceOutcome,
    TransferPath,
    TransferPlan,
    merge_pieces,
)
from tests.nightly import by_day

LIMITS = PlanLimits(batch_bytes=1000, batch_slices=4, tries_per_path=2)
SHM, TCP = TransferPath("shm", 300), TransferPath("tcp", 100)
PEER = PeerKey("there", 1)


def region(segment: str = "there", key: int = 0, length: int = 10**6) -> Region:
    return Region(segment, 1, bytes([key]) * 16, length)


def piece(length: int, at: int = 0, *, segment: str = "there", to: int | None = None) -> Piece:
    return Piece(region("here"), at, region(segment), at if to is None else to, length)


def plan_for(*pieces: Piece) -> TransferPlan:
    return TransferPlan(0, "write", pieces, LIMITS)


def batches(commands: Sequence[PlanCommand]) -> list[Batch]:
    return [command.batch for command in commands if isinstance(command, CarryBatch)]


def started(
    *pieces: Piece, paths: tuple[TransferPath, ...] = (SHM, TCP)
) -> tuple[TransferPlan, list[Batch]]:
    plan = plan_for(*pieces)
    assert plan.begin() == [ResolvePeer(PEER, fresh=False)]
    return plan, batches(plan.on_resolved(PEER, paths, moved=False))


def all_of(batch: Batch, fate: OutcomeKind, reason: str = "why") -> list[SliceOutcome]:
    return [SliceOutcome(fate, reason)] * len(batch.slices)


def only_error(commands: Sequence[PlanCommand]) -> Any:
    (command,) = commands
    assert isinstance(command, FinishTransfer)
    return command.error


def test_pieces_that_touch_on_both_sides_become_one() -> None:
    pieces = [piece(10, 0), piece(0, 77), piece(10, 10), piece(10, 20, to=500), piece(5, 40)]
    assert list(merge_pieces(pieces)) == [piece(20, 0), piece(10, 20, to=500), piece(5, 40)]


def test_slices_are_as_large_as_the_first_path_likes_and_batches_are_bounded() -> None:
    _, cut = started(piece(1700))
    assert [[each.length for each in batch.slices] for batch in cut] == [
        [300, 300, 300],
        [300, 300, 200],
    ]
    _, many = started(*(piece(10, i * 50) for i in range(10)))
    assert [len(batch.slices) for batch in many] == [4, 4, 2]


def test_only_the_slices_that_failed_are_tried_again() -> None:
    plan, (batch,) = started(piece(900))
    outcomes = [APPLIED, SliceOutcome(OutcomeKind.LOST, "why"), APPLIED]
    (again,) = batches(plan.on_carried(batch.number, outcomes))
    assert [each.number for each in again.slices] == [1]
    assert again.path == "shm"
    assert only_error(plan.on_carried(again.number, [APPLIED])) is None
    assert plan.n_retries == 1


def test_after_some_tries_the_next_path_is_taken() -> None:
    plan, (batch,) = started(piece(100))
    seen = []
    for _ in range(3):
        seen.append(batch.path)
        (batch,) = batches(plan.on_carried(batch.number, all_of(batch, OutcomeKind.LOST)))
    seen.append(batch.path)
    assert seen == ["shm", "shm", "tcp", "tcp"]


def test_a_path_that_can_not_serve_the_region_is_left_at_once() -> None:
    plan, (batch,) = started(piece(100))
    (batch,) = batches(plan.on_carried(batch.number, all_of(batch, OutcomeKind.UNUSABLE)))
    assert batch.path == "tcp"
    assert plan.n_retries == 0


@pytest.mark.parametrize(
    ("fate", "error"),
    [
        (OutcomeKind.LOST, Lost),
        (OutcomeKind.CORRUPTED, Corrupted),
        (OutcomeKind.STALE, Rejected),
        (OutcomeKind.UNTRUSTED, Untrusted),
    ],
)
def test_when_no_path_is_left_the_peer_is_looked_up_once_more(
    fate: OutcomeKind, error: type
) -> None:
    plan, (batch,) = started(piece(200), paths=(TCP,))
    commands: list[PlanCommand] = [CarryBatch(batch)]
    while batches(commands):
        (batch,) = batches(commands)
        commands = plan.on_carried(batch.number, all_of(batch, fate, "the reason"))
        plan.check()
    assert commands == [ResolvePeer(PEER, fresh=True)]
    failed = only_error(plan.on_resolved(PEER, (TCP,), moved=False))
    assert type(failed) is error
    tries = "failed 2 times" if fate in (OutcomeKind.LOST, OutcomeKind.CORRUPTED) else "failed"
    # Each slice is counted once, however often it failed.
    assert f"tcp {tries} for 2 slices, last: the reason" in str(failed)


def test_a_peer_without_a_path_is_looked_up_afresh_and_then_lost() -> None:
    plan = plan_for(piece(100))
    plan.begin()
    assert plan.on_resolved(PEER, (), moved=False) == [ResolvePeer(PEER, fresh=True)]
    assert isinstance(only_error(plan.on_resolved(PEER, (), moved=False)), Lost)


def test_a_refusal_is_final_but_waits_for_what_is_in_flight() -> None:
    plan, cut = started(piece(1700))
    assert plan.on_carried(cut[0].number, all_of(cut[0], OutcomeKind.REJECTED, "no")) == []
    assert not plan.finished
    error = only_error(plan.on_carried(cut[1].number, all_of(cut[1], OutcomeKind.LOST)))
    assert isinstance(error, Rejected)
    assert str(error) == "no"


def test_stopping_waits_for_what_is_in_flight_and_starts_nothing_new() -> None:
    plan, cut = started(piece(1700))
    assert plan.stop(Cancelled("enough")) == []
    assert plan.stop(Cancelled("again")) == []
    assert plan.on_carried(cut[0].number, all_of(cut[0], OutcomeKind.LOST)) == []
    error = only_error(plan.on_carried(cut[1].number, all_of(cut[1], OutcomeKind.APPLIED)))
    assert str(error) == "enough"
    assert plan.stop(Cancelled("late")) == []


def test_stopping_does_not_wait_for_a_lookup() -> None:
    plan = plan_for(piece(100))
    plan.begin()
    assert isinstance(only_error(plan.stop(Cancelled("enough"))), Cancelled)
    assert plan.on_resolved(PEER, (TCP,), moved=False) == []
    assert plan.on_unresolved(PEER, Lost("gone")) == []


def test_nothing_to_move_is_finished_at_once() -> None:
    assert only_error(plan_for().begin()) is None
    assert only_error(plan_for(piece(0)).begin()) is None


class AnyOrder(RuleBasedStateMachine):
    """Facts in any order, some twice: one end, and every byte accounted for."""

    @initialize(
        lengths=st.lists(st.integers(0, 900), max_size=8), tries=st.integers(1, 3), data=st.data()
    )
    def submit(self, lengths: list[int], tries: int, data: st.DataObject) -> None:
        pieces = [
            piece(length, i * 1000, segment=data.draw(st.sampled_from(["a", "b"])))
            for i, length in enumerate(lengths)
        ]
        self.plan = TransferPlan(0, "read", pieces, PlanLimits(1000, 4, tries))
        self.asked: list[ResolvePeer] = []
        self.flying: dict[int, Batch] = {}
        self.finishes: list[FinishTransfer] = []
        self.n_given = 0
        self.stopped = False
        self.perform(self.plan.begin())

    def perform(self, commands: Sequence[PlanCommand]) -> None:
        assert not (self.finishes and commands), "a command after the end"
        for command in commands:
            match command:
                case ResolvePeer():
                    self.asked.append(command)
                case CarryBatch(batch=batch):
                    assert batch.number not in self.flying
                    assert batch.peer.segment in {"a", "b"}
                    self.flying[batch.number] = batch
                    self.n_given += len(batch.slices)
                case FinishTransfer():
                    self.finishes.append(command)

    @rule(data=st.data(), moved=st.booleans())
    def resolve(self, data: st.DataObject, moved: bool) -> None:
        if self.asked:
            asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
            paths = data.draw(st.sampled_from([(SHM, TCP), (TCP,), (SHM,), ()]))
            self.perform(self.plan.on_resolved(asked.peer, paths, moved=moved))

    @rule(data=st.data())
    def fail_to_resolve(self, data: st.DataObject) -> None:
        if self.asked and data.draw(st.integers(0, 5)) == 0:
            self.perform(self.plan.on_unresolved(self.asked.pop().peer, Lost("gone")))

    @rule(data=st.data(), twice=st.booleans())
    def carry(self, data: st.DataObject, twice: bool) -> None:
        if not self.flying:
            return
        number = data.draw(st.sampled_from(sorted(self.flying)))
        batch = self.flying.pop(number)
        fates = st.sampled_from(
            [OutcomeKind.APPLIED, OutcomeKind.APPLIED, OutcomeKind.APPLIED, *OutcomeKind]
        )
        outcomes = [SliceOutcome(data.draw(fates), "why") for _ in batch.slices]
        self.perform(self.plan.on_carried(number, outcomes))
        if twice:
            assert self.plan.on_carried(number, outcomes) == []

    @rule(really=st.integers(0, 9))
    def stop(self, really: int) -> None:
        if really == 0:
            self.stopped = True
            self.perform(self.plan.stop(Cancelled("enough")))

    @invariant()
    def holds(self) -> None:
        self.plan.check()
        assert len(self.finishes) <= 1
        if self.finishes:
            assert not self.flying, "finished while batches were in flight"
        else:
            assert self.flying or self.asked, "nothing is going on, and it is not finished"
        n_slices = sum(-(-900 // 100) for _ in range(8))
        assert self.n_given <= n_slices * 2 * 2 * 3, "tried without end"


AnyOrder.TestCase.settings = settings(
    max_examples=by_day(25, at_night=450),
    stateful_step_count=by_day(20, at_night=40),
    deadline=None,
)
test_facts_in_any_order = AnyOrder.TestCase


NOTICE = OutgoingNotification(b"i" * 16, "here", b"done")


def notifying(*pieces: Piece) -> tuple[TransferPlan, list[Batch]]:
    plan = TransferPlan(0, "write", pieces, LIMITS, NOTICE)
    plan.begin()
    return plan, batches(plan.on_resolved(PEER, (SHM, TCP), moved=False))


def test_the_notice_goes_out_when_the_last_slice_is_applied_and_not_before() -> None:
    plan, given = notifying(piece(2500))
    assert len(given) > 1
    for batch in given[:-1]:
        assert batch.notification is None
        assert plan.on_carried(batch.number, all_of(batch, OutcomeKind.APPLIED)) == []
    (last,) = batches(plan.on_carried(given[-1].number, all_of(given[-1], OutcomeKind.APPLIED)))
    assert (last.notification, last.path, [each.length for each in last.slices]) == (
        NOTICE,
        "shm",
        [0],
    )
    assert plan.on_carried(last.number, all_of(last, OutcomeKind.APPLIED)) == [FinishTransfer(None)]
    assert plan.paths_used == ["shm"]
    plan.check()


def test_a_notice_is_tried_again_and_then_on_the_next_path() -> None:
    plan, (data,) = notifying(piece(100))
    (batch,) = batches(plan.on_carried(data.number, all_of(data, OutcomeKind.APPLIED)))
    paths = []
    for fate in (OutcomeKind.LOST, OutcomeKind.LOST, OutcomeKind.LOST):
        paths.append(batch.path)
        (batch,) = batches(plan.on_carried(batch.number, all_of(batch, fate)))
        assert batch.notification == NOTICE
        plan.check()
    assert [*paths, batch.path] == ["shm", "shm", "tcp", "tcp"]
    assert plan.on_carried(batch.number, all_of(batch, OutcomeKind.APPLIED)) == [
        FinishTransfer(None)
    ]


def test_a_notice_that_is_refused_ends_the_transfer_in_that_error() -> None:
    plan, (data,) = notifying(piece(100))
    (batch,) = batches(plan.on_carried(data.number, all_of(data, OutcomeKind.APPLIED)))
    (finish,) = plan.on_carried(batch.number, all_of(batch, OutcomeKind.REJECTED, "no room"))
    assert isinstance(finish, FinishTransfer)
    assert isinstance(finish.error, Rejected)


def test_a_transfer_stopped_while_it_notifies_ends_once() -> None:
    plan, (data,) = notifying(piece(100))
    (batch,) = batches(plan.on_carried(data.number, all_of(data, OutcomeKind.APPLIED)))
    error = Cancelled("enough")
    assert plan.stop(error) == []
    assert plan.on_carried(batch.number, all_of(batch, OutcomeKind.APPLIED)) == [
        FinishTransfer(error)
    ]
    assert plan.stop(error) == []


def test_a_path_that_does_not_reach_the_peer_is_left_for_all_slices_at_once() -> None:
    plan, cut = started(piece(2700))
    assert len(cut) == 3
    outcome = SliceOutcome(OutcomeKind.UNREACHABLE, "no peer there")
    moved = batches(plan.on_carried(cut[0].number, [outcome] * len(cut[0].slices)))
    assert {batch.path for batch in moved} == {"tcp"}
    for batch in cut[1:]:
        assert plan.unreachable(batch) == outcome, "it would be tried again"
    assert plan.unreachable(moved[0]) is None
    # What was lost on its way meanwhile does not come back to it either.
    again = batches(plan.on_carried(cut[1].number, all_of(cut[1], OutcomeKind.LOST)))
    assert {batch.path for batch in again} == {"tcp"}
    plan.check()


def test_a_peer_that_moved_is_tried_anew_on_a_path_that_did_not_reach_it() -> None:
    plan, (batch,) = started(piece(100), paths=(TCP,))
    again = plan.on_carried(batch.number, all_of(batch, OutcomeKind.UNREACHABLE))
    assert again == [ResolvePeer(PEER, fresh=True)]
    (batch,) = batches(plan.on_resolved(PEER, (TCP,), moved=True))
    assert plan.unreachable(batch) is None
    assert only_error(plan.on_carried(batch.number, all_of(batch, OutcomeKind.APPLIED))) is None
