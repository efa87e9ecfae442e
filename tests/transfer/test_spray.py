"""Which rail is next: the one expected to be done first, and not one that is paused."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halfmoon_transfer.planning.spray import Spray, SprayLimits, SprayTicket
from tests.nightly import by_day

MIB = 1024 * 1024
LIMITS = SprayLimits(cooldown_s=1.0, cooldown_max_s=8.0, explore_every=100)


def spray(*names: str) -> Spray:
    return Spray(names or ("a", "b"), LIMITS)


def teach(rails: Spray, now: float, **bandwidths: float) -> float:
    """Let each rail show its bandwidth, by batches that go over it alone."""
    shown: Counter[str] = Counter()
    while min(shown[name] for name in bandwidths) < 30:
        ticket = rails.choose(MIB, now)
        shown[ticket.rail] += 1
        now += ticket.queued_bytes / bandwidths[ticket.rail]
        rails.got_through(ticket, now)
        assert now < 1e6
    return now


def fail(rails: Spray, name: str, now: float) -> None:
    """Lose a batch on this rail, and drop what it takes to get there."""
    while (ticket := rails.choose(1, now)).rail != name:
        rails.dropped(ticket)
    assert rails.failed(ticket, now)


def test_equals_take_turns() -> None:
    rails = spray("a", "b", "c")
    chosen = []
    for _ in range(6):
        ticket = rails.choose(10, 0.0)
        chosen.append(ticket.rail)
        rails.got_through(ticket, 0.001)
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_what_is_under_way_counts() -> None:
    rails = spray()
    first = rails.choose(8 * MIB, 0.0)
    others = [rails.choose(MIB, 0.0).rail for _ in range(7)]
    assert first.rail == "a"
    assert others == ["b"] * 7


def test_bytes_are_shared_by_bandwidth() -> None:
    """Three times as fast carries three times as much, when both are kept busy."""
    rails = spray()
    teach(rails, 0.0, a=3e8, b=1e8)
    chosen = Counter(rails.choose(MIB, 100.0).rail for _ in range(99))
    assert 70 <= chosen["a"] <= 78


def test_a_far_rail_is_used_when_the_near_one_is_that_much_busier() -> None:
    rails = spray()
    far = {"b": 1}
    chosen = [rails.choose(MIB, 0.0, far).rail for _ in range(12)]
    assert chosen[:4] == ["a"] * 4
    assert chosen.count("b") == 2
    assert spray().choose(MIB, 0.0, {"a": 2}).rail == "b"


def test_another_than_the_best_is_looked_at_now_and_then() -> None:
    rails = spray()
    now = teach(rails, 0.0, a=1e9, b=1e7)
    chosen: Counter[str] = Counter()
    for _ in range(400):
        ticket = rails.choose(MIB, now)
        chosen[ticket.rail] += 1
        now += ticket.queued_bytes / {"a": 1e9, "b": 1e7}[ticket.rail]
        rails.got_through(ticket, now)
    assert chosen["b"] == 4


def test_a_rail_that_became_fast_is_found_out() -> None:
    rails = spray()
    now = teach(rails, 0.0, a=1e8, b=1e7)
    chosen: Counter[str] = Counter()
    for _ in range(3000):
        ticket = rails.choose(MIB, now)
        chosen[ticket.rail] += 1
        now += ticket.queued_bytes / {"a": 1e8, "b": 1e9}[ticket.rail]
        rails.got_through(ticket, now)
    assert chosen["b"] > 1000


def test_one_odd_observation_does_not_decide() -> None:
    rails = spray("a")
    teach(rails, 0.0, a=1e8)
    ticket = rails.choose(MIB, 0.0)
    rails.got_through(ticket, 1e-9)
    expected = rails.expected_s(rails.choose(MIB, 0.0))
    assert expected is not None
    assert expected > MIB / 1e8 / 4


def test_small_batches_say_nothing_about_bandwidth() -> None:
    rails = spray("a")
    ticket = rails.choose(1, 0.0)
    rails.got_through(ticket, 1.0)
    assert rails.expected_s(rails.choose(1, 1.0)) is None


def test_a_rail_that_failed_is_left_alone_and_returns_through_a_probe() -> None:
    rails = spray()
    fail(rails, "a", 10.0)
    assert rails.paused() == ["a"]
    assert {rails.choose(MIB, 10.0).rail for _ in range(150)} == {"b"}
    assert rails.next_due() == 11.0
    assert rails.due(10.9, limit=9) == []
    assert rails.due(11.0, limit=9) == ["a"]
    assert rails.due(11.0, limit=9) == [], "one probe at a time"
    rails.probed("a", 11.1, ok=True)
    assert rails.paused() == []
    assert rails.choose(MIB, 11.1).rail == "a"


def test_each_pause_is_twice_as_long_up_to_a_limit() -> None:
    rails = spray()
    now = 0.0
    fail(rails, "a", now)
    pauses = []
    for _ in range(6):
        due = rails.next_due()
        assert due is not None
        pauses.append(due - now)
        now = due
        rails.due(now, limit=9)
        rails.probed("a", now, ok=False)
    assert pauses == [1, 2, 4, 8, 8, 8]


@pytest.mark.parametrize(("good_for_s", "next_pause_s"), [(0.5, 2.0), (1.0, 1.0), (9.0, 1.0)])
def test_a_rail_is_forgiven_when_it_stayed_good_as_long_as_it_was_paused(
    good_for_s: float, next_pause_s: float
) -> None:
    rails = spray("a")
    assert rails.failed(rails.choose(1, 0.0), 0.0)
    rails.due(1.0, limit=9)
    rails.probed("a", 1.0, ok=True)
    now = 1.0 + good_for_s
    assert rails.failed(rails.choose(1, now), now)
    assert rails.next_due() == now + next_pause_s


def test_batches_of_one_failure_count_once() -> None:
    rails = spray("a")
    tickets = [rails.choose(1, 0.0) for _ in range(5)]
    assert [rails.failed(ticket, 0.5) for ticket in tickets] == [True] + [False] * 4
    assert rails.next_due() == 1.5


def test_a_batch_from_before_the_pause_does_not_end_it() -> None:
    rails = spray("a")
    early, lost = rails.choose(1, 0.0), rails.choose(1, 0.0)
    rails.failed(lost, 0.1)
    rails.got_through(early, 0.2)
    assert rails.paused() == ["a"]


def test_with_no_good_rail_the_one_that_is_due_first_is_taken_and_may_prove_itself() -> None:
    rails = spray()
    fail(rails, "a", 0.0)
    fail(rails, "b", 0.5)
    ticket = rails.choose(1, 0.6)
    assert ticket.rail == "a"
    rails.got_through(ticket, 0.7)
    assert rails.paused() == ["b"]


class Machine(RuleBasedStateMachine):
    """Any order of events: nothing is refused, nothing is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rails = spray("a", "b", "c")
        self.now = 0.0
        self.out: list[SprayTicket] = []
        self.probes: list[str] = []

    @rule(n_bytes=st.integers(0, 10 * MIB), distance=st.integers(0, 2))
    def choose(self, n_bytes: int, distance: int) -> None:
        paused = self.rails.paused()
        ticket = self.rails.choose(n_bytes, self.now, {"b": distance})
        assert ticket.rail not in paused or len(paused) == 3
        self.out.append(ticket)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        ticket = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        match data.draw(st.sampled_from(["through", "failed", "dropped"])):
            case "through":
                self.rails.got_through(ticket, self.now)
            case "failed":
                self.rails.failed(ticket, self.now)
            case _:
                self.rails.dropped(ticket)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(limit=st.integers(1, 3))
    def look(self, limit: int) -> None:
        due = self.rails.due(self.now, limit=limit)
        assert set(due) <= set(self.rails.paused()) - set(self.probes)
        self.probes += due

    @precondition(lambda self: self.probes)
    @rule(ok=st.booleans())
    def probed(self, ok: bool) -> None:
        name = self.probes.pop(0)
        self.rails.probed(name, self.now, ok=ok)
        # The next pause's end is known again, or the rail is good.
        assert name not in self.rails.paused() or self.rails.next_due() is not None

    @invariant()
    def holds(self) -> None:
        self.rails.check()
        assert self.rails.n_in_flight == len(self.out)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=by_day(25, at_night=900),
    stateful_step_count=by_day(20, at_night=50),
    deadline=None,
)
