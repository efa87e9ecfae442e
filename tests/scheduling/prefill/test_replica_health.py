"""Which replicas a reader asks, and which it leaves out for a while."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_scheduling.prefill.replica_health import ReplicaHealth


def replica(name: str, generation: int = 1) -> KvstoreAddress:
    return KvstoreAddress(WorkerId(name), generation, f"tcp://{name}")


A, B, C = replica("a"), replica("b"), replica("c")


def test_all_are_asked_in_their_order_but_one_that_failed() -> None:
    health = ReplicaHealth(pause_s=5)
    assert health.usable([B, A, C], 0) == [B, A, C]
    assert health.failed(B, 10) == 5
    assert health.usable([B, A, C], 14.9) == [A, C]
    assert health.left_out(14.9) == [B]
    # Asked is its next start, whatever the earlier one did.
    assert health.usable([replica("b", 2)], 10) == [replica("b", 2)]


@pytest.mark.parametrize("answered", [True, False])
def test_when_its_pause_is_over_one_reader_probes_it_after_asking_the_well_ones(
    answered: bool,
) -> None:
    health = ReplicaHealth(pause_s=5)
    health.failed(B, 10)
    assert health.usable([B, A], 15) == [A, B]
    health.asked(B, 15)
    assert health.usable([B, A], 15) == [A]
    if answered:
        assert health.answered(B)
        assert health.usable([B, A], 15) == [B, A]
        assert health.failed(B, 16) == 5, "the pause begins anew"
    else:  # a probe that nobody hears of again keeps others away for one pause only
        assert not health.may_ask(B, 19)
        assert health.may_ask(B, 20)


def test_each_probe_that_fails_doubles_the_pause_up_to_a_limit() -> None:
    health = ReplicaHealth(pause_s=5, max_pause_s=15)
    now, pauses = 0.0, []
    for _ in range(4):
        pauses.append(health.failed(B, now))
        now += pauses[-1]
        health.asked(B, now)
    assert pauses == [5, 10, 15, 15]


def test_several_readers_that_fail_at_one_breakdown_count_as_one() -> None:
    health = ReplicaHealth(pause_s=5)
    health.failed(B, 10)
    assert health.failed(B, 12) == 3
    assert health.may_ask(B, 15)


@pytest.mark.parametrize(("pause_s", "max_pause_s"), [(0, 1), (-1, 1), (2, 1)])
def test_pauses_that_make_no_sense_are_refused(pause_s: float, max_pause_s: float) -> None:
    with pytest.raises(ValueError, match="pause"):
        ReplicaHealth(pause_s=pause_s, max_pause_s=max_pause_s)


class Readers(RuleBasedStateMachine):
    """Whatever readers report in whatever order, nobody is left out for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.health = ReplicaHealth(pause_s=1, max_pause_s=8)
        self.now = 0.0

    which = st.sampled_from([A, B, C])

    @rule(replica=which)
    def fails(self, replica: KvstoreAddress) -> None:
        assert 0 < self.health.failed(replica, self.now) <= 8 + 1e-9  # a difference of two times
        assert not self.health.may_ask(replica, self.now)

    @rule(replica=which)
    def answers(self, replica: KvstoreAddress) -> None:
        self.health.answered(replica)
        assert self.health.may_ask(replica, self.now)

    @rule(replica=which)
    def is_asked(self, replica: KvstoreAddress) -> None:
        if self.health.may_ask(replica, self.now):
            self.health.asked(replica, self.now)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds(self) -> None:
        self.health.check()

    def teardown(self) -> None:
        assert self.health.usable([A, B, C], self.now + 100) != []
        assert self.health.left_out(self.now + 100) == []


TestReaders = Readers.TestCase
