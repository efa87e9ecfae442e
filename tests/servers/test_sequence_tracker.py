"""Batches come out in order and once, whatever the network and the server do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon_servers.kv_events import sequence_tracker
from halfmoon_servers.kv_events.sequence_tracker import (
    ApplyBatch,
    AskReplay,
    ResetCache,
    SequenceTracker,
    Step,
)


def delivered(steps: list[Step]) -> list[bytes]:
    return [step.payload for step in steps if isinstance(step, ApplyBatch)]


def test_without_a_replay_a_gap_is_counted_and_the_rest_goes_on() -> None:
    tracker = SequenceTracker(can_replay=False)
    assert tracker.on_connected() == []
    assert delivered(tracker.on_live(7, b"7")) == [b"7"]
    assert delivered(tracker.on_live(9, b"9")) == [b"9"]
    assert tracker.n_gaps == 2


def test_a_restart_is_seen_by_numbers_that_begin_again() -> None:
    tracker = SequenceTracker(can_replay=False)
    tracker.on_live(0, b"0")
    tracker.on_live(1, b"1")
    assert tracker.on_live(0, b"new") == [ResetCache(), ApplyBatch(b"new")]
    assert tracker.n_restarts == 1


def test_batches_that_a_replay_had_too_are_not_taken_for_a_restart() -> None:
    tracker = SequenceTracker(can_replay=True)
    tracker.on_connected()
    for sequence in range(3):
        tracker.on_replayed(sequence, b"%d" % sequence)
    tracker.on_replay_ended()
    for sequence in range(3):
        assert tracker.on_live(sequence, b"%d" % sequence) == []
    assert delivered(tracker.on_live(3, b"3")) == [b"3"]


def test_a_replay_that_does_not_come_leaves_a_gap() -> None:
    tracker = SequenceTracker(can_replay=True)
    tracker.on_live(0, b"0")
    tracker.on_live(5, b"5")
    assert delivered(tracker.on_replay_failed()) == [b"5"]
    assert tracker.n_gaps == 1
    assert tracker.on_live(9, b"9") == [AskReplay(5)]


def test_numbers_that_go_on_prove_no_server_when_the_replay_of_a_new_connection_fails() -> None:
    tracker = SequenceTracker(can_replay=True)
    tracker.on_connected()
    tracker.on_replay_ended()
    assert delivered(tracker.on_live(0, b"old")) == [b"old"]
    tracker.on_connected()
    tracker.on_live(1, b"new")
    steps = tracker.on_replay_failed()
    assert isinstance(steps[0], ResetCache)
    assert delivered(steps) == [b"new"]


def test_a_gap_that_no_replay_fills_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = SequenceTracker(can_replay=True)
    tracker.on_live(0, b"0")
    assert tracker.on_live(2, b"2") == [AskReplay(0)]
    tracker.on_replayed(0, b"0")
    assert delivered(tracker.on_replay_ended()) == [b"2"]
    assert (tracker.n_gaps, tracker.is_replaying) == (1, False)


def test_what_waits_for_a_replay_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_tracker, "MAX_WAITING_BATCHES", 3)
    monkeypatch.setattr(sequence_tracker, "MAX_WAITING_BYTES", 10)
    tracker = SequenceTracker(can_replay=True)
    tracker.on_connected()
    for sequence in range(20):
        tracker.on_live(sequence, b"x" * (sequence % 12))
        tracker.check()
    tracker.on_replay_ended()
    tracker.check()


class LossyServer(RuleBasedStateMachine):
    """A server that restarts, behind a network that loses, repeats and delays batches."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = SequenceTracker(can_replay=True)
        self.start = 0
        self.published: list[bytes] = []  # by the server's present start
        self.on_the_way: list[tuple[int, bytes]] = []
        self.replay: list[tuple[int, bytes]] | None = None
        self.held: list[bytes] = []  # delivered since the last reset

    def perform(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case ApplyBatch(payload):
                    self.held.append(payload)
                case ResetCache():
                    self.held.clear()
                case AskReplay(first):
                    self.replay = list(enumerate(self.published))[first:]

    @rule()
    def publish(self) -> None:
        payload = b"%d/%d" % (self.start, len(self.published))
        self.on_the_way.append((len(self.published), payload))
        self.published.append(payload)

    @precondition(lambda self: self.on_the_way)
    @rule(lost=st.booleans())
    def arrive(self, lost: bool) -> None:
        batch = self.on_the_way.pop(0)
        if not lost:
            self.perform(self.tracker.on_live(*batch))

    @precondition(lambda self: self.replay is not None)
    @rule()
    def replay_goes_on(self) -> None:
        assert self.replay is not None
        if self.replay:
            self.perform(self.tracker.on_replayed(*self.replay.pop(0)))
            return
        self.replay = None
        self.perform(self.tracker.on_replay_ended())

    @precondition(lambda self: self.replay is not None)
    @rule()
    def replay_fails(self) -> None:
        self.replay = None
        self.perform(self.tracker.on_replay_failed())

    @rule()
    def reconnect(self) -> None:
        self.on_the_way.clear()
        self.replay = None
        self.perform(self.tracker.on_connected())

    @rule()
    def restart(self) -> None:
        self.start += 1
        self.published = []
        self.reconnect()

    @invariant()
    def the_tracker_is_whole_and_delivers_each_batch_once(self) -> None:
        self.tracker.check()
        assert len(set(self.held)) == len(self.held)
        assert self.tracker.is_replaying == (self.replay is not None)

    def _end_replay(self) -> None:
        while self.replay is not None:
            self.replay_goes_on()

    def teardown(self) -> None:
        """A last connection without losses gives all that the server has, and no more."""
        self.reconnect()
        self._end_replay()
        for batch in self.on_the_way:
            self.perform(self.tracker.on_live(*batch))
            self._end_replay()
        if self.tracker.n_gaps == 0:
            assert self.held == self.published
        assert self.held[-1:] == self.published[-1:]
        starts = {payload.split(b"/")[0] for payload in self.held}
        assert starts <= {b"%d" % self.start}


TestLossyServer = LossyServer.TestCase
TestLossyServer.settings = settings(max_examples=200, stateful_step_count=40)
