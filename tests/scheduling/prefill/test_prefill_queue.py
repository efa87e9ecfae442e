from itertools import combinations
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks
from halfmoon_scheduling.prefill.prefill_queue import (
    OVERTAKEN_PASSES,
    PrefillChunk,
    PrefillQueue,
    QueueFull,
)
from halfmoon_scheduling.prefill.queue_order import MAX_SLACK_S, QUEUE_ORDERS

A, B, C, D, E = (RequestId(name) for name in "abcde")


def queue(
    chunk_tokens: int = 10,
    max_requests: int = 8,
    long_tokens: int | None = None,
    order: str = "arrival",
) -> PrefillQueue:
    """A queue; `long_tokens`: what a request alone in its pass may take, at a second a token."""
    long_chunks = None
    if long_tokens is not None:
        limits = LongChunkLimits(max_tokens=1000, max_s=long_tokens)
        long_chunks = LongChunks(limits, PrefillCost(c0_s=0.0, c1_s=1.0))
    return PrefillQueue(
        chunk_tokens=chunk_tokens,
        max_requests=max_requests,
        long_chunks=long_chunks,
        order=QUEUE_ORDERS[order],
    )


# -- shares ------------------------------------------------------------------------------------


def share(q: PrefillQueue, n_tokens: int, allowed: int, priority: int = 0) -> None:
    q.push(A, n_tokens=n_tokens, n_cached=0, is_share=True, priority=priority)
    q.allow(A, allowed)


def computed(q: PrefillQueue) -> list[PrefillChunk]:
    batch = q.next_batch()
    q.advance(batch)
    return batch


def test_short_prompts_go_between_two_chunks_of_a_share() -> None:
    q = queue()
    share(q, 30, 8)
    q.push(B, n_tokens=6, n_cached=0)
    q.push(C, n_tokens=4, n_cached=0)
    q.push(D, n_tokens=9, n_cached=0)
    assert computed(q) == [PrefillChunk(A, 0, 8, False)]
    q.allow(A, 16)
    assert computed(q) == [PrefillChunk(B, 0, 6, True), PrefillChunk(C, 0, 4, True)]
    assert computed(q) == [PrefillChunk(A, 8, 8, False)]
    q.allow(A, 24)
    assert computed(q) == [PrefillChunk(D, 0, 9, True)]
    assert computed(q) == [PrefillChunk(A, 16, 8, False)]


def test_prompts_of_several_passes_unready_ones_and_less_urgent_ones_wait_for_a_share() -> None:
    q = queue()
    share(q, 30, 8, priority=1)
    q.push(B, n_tokens=6, n_cached=0)
    q.push(C, n_tokens=11, n_cached=0, priority=1)
    q.push(D, n_tokens=5, n_cached=0, priority=1, ready=False)
    for stop in (8, 16, 24, 30):
        q.allow(A, stop)
        (chunk,) = computed(q)
        assert chunk.request_id == A
    assert computed(q) == [PrefillChunk(C, 0, 10, False)]


# -- long chunks ---------------------------------------------------------------------------------


#: Tokens that a request alone in its pass may take, tokens of requests, and the batches.
LONG: dict[str, tuple[int, list[int], list[list[PrefillChunk]]]] = {
    "of a prompt alone": (
        40,
        [50],
        [[PrefillChunk(A, 0, 40, False)], [PrefillChunk(A, 40, 10, True)]],
    ),
    "shared with none of those behind it": (40, [30, 5], [[PrefillChunk(A, 0, 30, True)]]),
    "short where several share a pass": (
        40,
        [4, 30],
        [[PrefillChunk(A, 0, 4, True), PrefillChunk(B, 0, 6, False)]],
    ),
    "never below what requests may share": (3, [30], [[PrefillChunk(A, 0, 10, False)]]),
}


@pytest.mark.parametrize(("long_tokens", "tokens", "batches"), LONG.values(), ids=LONG)
def test_long_chunks_are(
    long_tokens: int, tokens: list[int], batches: list[list[PrefillChunk]]
) -> None:
    q = queue(long_tokens=long_tokens)
    for request_id, n_tokens in zip((A, B), tokens, strict=False):
        q.push(request_id, n_tokens=n_tokens, n_cached=0)
    for batch in batches:
        assert computed(q) == batch


def test_a_request_that_must_not_have_long_chunks_has_none() -> None:
    q = queue(long_tokens=40)
    q.push(A, n_tokens=30, n_cached=0, may_be_long=False)
    for _ in range(2):  # the second time the same chunk is said to be done
        q.advance([PrefillChunk(A, 0, 10, False)])
    assert q.next_batch() == [PrefillChunk(A, 10, 10, False)]


def test_chunks_are_short_while_a_request_that_goes_first_gets_ready() -> None:
    q = queue(long_tokens=40)
    q.push(A, n_tokens=5, n_cached=0, ready=False)
    q.push(B, n_tokens=30, n_cached=0)
    assert q.next_batch() == [PrefillChunk(B, 0, 10, False)]
    q.remove(A)
    assert q.next_batch() == [PrefillChunk(B, 0, 30, True)]


def test_long_chunks_shrink_on_a_worker_that_is_slower_than_it_said() -> None:
    q = queue(long_tokens=40)
    q.push(A, n_tokens=100, n_cached=0)
    for _ in range(50):
        q.observe_pass([PrefillChunk(B, 0, 10, False)], 20.0)
    assert q.next_batch() == [PrefillChunk(A, 0, 20, False)]


# -- deadlines -----------------------------------------------------------------------------------


def by_slack(chunk_tokens: int = 10, max_requests: int = 100) -> PrefillQueue:
    """A queue in the order of slack, in which each token is predicted to take a second."""
    return queue(chunk_tokens, max_requests, long_tokens=1, order="slack")


def test_the_least_slack_goes_first() -> None:
    q = by_slack()
    q.push(A, n_tokens=5, n_cached=0, arrived_s=0.0, deadline_s=40.0)  # 35 s
    q.push(B, n_tokens=5, n_cached=0, arrived_s=1.0, deadline_s=20.0)  # due at 15 s
    q.push(C, n_tokens=25, n_cached=0, arrived_s=2.0, deadline_s=30.0)  # due at 5 s
    q.push(D, n_tokens=25, n_cached=20, arrived_s=3.0, deadline_s=30.0)  # due at 25 s
    q.push(E, n_tokens=1, n_cached=0, arrived_s=4.0, priority=1)
    assert list(q.in_order()) == [E, C, B, D, A]


def test_slack_follows_what_turns_out_to_be_cached() -> None:
    q = by_slack()
    q.push(A, n_tokens=30, n_cached=0, arrived_s=0.0, deadline_s=50.0, ready=False)
    q.push(B, n_tokens=10, n_cached=0, arrived_s=0.0, deadline_s=45.0)
    assert list(q.in_order()) == [A, B]
    q.rebase(A, 20)
    q.check()
    assert list(q.in_order()) == [B, A]


def test_two_prompts_do_not_take_turns_while_they_are_computed() -> None:
    q = by_slack()
    q.push(A, n_tokens=30, n_cached=0, arrived_s=0.0, deadline_s=40.0)
    q.push(B, n_tokens=30, n_cached=0, arrived_s=0.0, deadline_s=41.0)
    computed = []
    while batch := q.next_batch():
        computed += [chunk.request_id for chunk in batch]
        q.advance(batch)
    assert computed == [A, A, A, B, B, B]


#: Few values, so that two requests often compete; every sum of them is exact.
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 20.0, MAX_SLACK_S + 1.0]),  # seconds since the arrival before
        st.sampled_from([1, 5, 40]),  # tokens
        st.sampled_from([None, 0.0, 10.0, 45.0, 60.0, 300.0]),  # seconds until its deadline
        st.integers(0, 1),  # priority
    ),
    min_size=1,
    max_size=20,
)


class Arrived(NamedTuple):
    """A queued request, of which each token takes a second."""

    number: int
    arrived_s: float
    n_tokens: int
    deadline_s: float | None
    priority: int

    @property
    def slack_s(self) -> float:
        """How long it could wait when it arrived and still be in time; infinite, or negative."""
        return inf if self.deadline_s is None else self.deadline_s - self.n_tokens - self.arrived_s


def queued_by_slack(
    arrivals: list[tuple[float, int, float | None, int]],
) -> list[Arrived]:
    """The requests, in the order of their turns."""
    q = by_slack()
    arrived = []
    now = 0.0
    for i, (pause_s, n_tokens, left_s, priority) in enumerate(arrivals):
        now += pause_s
        one = Arrived(i, now, n_tokens, None if left_s is None else now + left_s, priority)
        q.push(
            RequestId(str(i)),
            n_tokens=n_tokens,
            n_cached=0,
            priority=priority,
            arrived_s=now,
            deadline_s=one.deadline_s,
        )
        arrived.append(one)
    q.check()
    return [arrived[int(request_id)] for request_id in q.in_order()]


@given(ARRIVALS)
def test_none_waits_for_those_that_arrive_once_its_slack_is_used_up_and_the_least_slack_goes_first(
    arrivals: list[tuple[float, int, float | None, int]],
) -> None:
    turns = queued_by_slack(arrivals)
    assert [one.priority for one in turns] == sorted((a[3] for a in arrivals), reverse=True)
    for first, second in combinations(turns, 2):
        if first.priority != second.priority:
            continue
        waits_s = min(MAX_SLACK_S, max(0.0, second.slack_s))
        assert first.arrived_s <= second.arrived_s + waits_s
        if all(0 <= one.slack_s <= MAX_SLACK_S for one in (first, second)):  # both can be in time
            assert first.slack_s + first.arrived_s <= second.slack_s + second.arrived_s


@given(ARRIVALS)
def test_slack_is_the_order_of_arrival_where_no_request_has_a_deadline(
    arrivals: list[tuple[float, int, float | None, int]],
) -> None:
    turns = queued_by_slack([(pause_s, n, None, priority) for pause_s, n, _, priority in arrivals])
    assert turns == sorted(turns, key=lambda one: (-one.priority, one.number))


def test_a_request_with_little_slack_is_not_overtaken_for_ever_by_larger_priorities() -> None:
    q = by_slack()
    q.push(A, n_tokens=10, n_cached=0, arrived_s=0.0, deadline_s=12.0)
    for i in range(OVERTAKEN_PASSES):
        q.push(RequestId(f"urgent-{i}"), n_tokens=10, n_cached=0, arrived_s=1.0, priority=1)
        q.advance(q.next_batch())
        q.check()
    q.push(B, n_tokens=10, n_cached=0, arrived_s=2.0, deadline_s=2.0, priority=9)
    assert next(q.in_order()) == A


# -- requests that wait --------------------------------------------------------------------------


def test_the_largest_priority_goes_first_and_then_the_earlier_arrival() -> None:
    q = queue(chunk_tokens=100)
    for rid, priority in ((A, 0), (B, 2), (C, 0), (D, 2), (E, -1)):
        q.push(rid, n_tokens=5, n_cached=0, priority=priority)
    assert list(q.in_order()) == [B, D, A, C, E]
    assert [chunk.request_id for chunk in q.next_batch()] == [B, D, A, C, E]


def test_a_prompt_under_way_pauses_between_two_passes_for_a_larger_priority() -> None:
    q = queue()
    q.push(A, n_tokens=25, n_cached=0)
    q.advance(q.next_batch())
    q.push(B, n_tokens=8, n_cached=0, priority=1)
    assert q.next_batch() == [PrefillChunk(B, 0, 8, True), PrefillChunk(A, 10, 2, False)]


def test_who_is_overtaken_for_long_enough_goes_before_everybody() -> None:
    q = queue()
    q.push(A, n_tokens=10, n_cached=0)
    q.push(B, n_tokens=10, n_cached=0)
    n_passes = 0
    for i in range(10_000):
        q.push(RequestId(f"urgent-{i}"), n_tokens=10, n_cached=0, priority=1_000)
        (chunk,) = q.next_batch()
        q.advance([chunk])
        q.check()
        if chunk.request_id == A:
            break
        n_passes += 1
    assert n_passes == OVERTAKEN_PASSES
    assert [chunk.request_id for chunk in q.next_batch()] == [B]  # it waited as long


def test_who_merely_came_later_overtakes_nobody() -> None:
    q = queue()
    q.push(A, n_tokens=10, n_cached=0, ready=False)
    for i in range(2 * OVERTAKEN_PASSES):
        q.push(RequestId(f"other-{i}"), n_tokens=10, n_cached=0)
        q.advance(q.next_batch())
    q.push(B, n_tokens=10, n_cached=0, priority=1)
    q.ready(A)
    assert [chunk.request_id for chunk in q.next_batch()] == [B]


class QueueAgainstList(RuleBasedStateMachine):
    """The queue beside a list of [id, tokens, position, ready, started]."""

    IDS = st.sampled_from([RequestId(name) for name in "abcde"])

    def __init__(self) -> None:
        super().__init__()
        self.queue = PrefillQueue(chunk_tokens=7, max_requests=4)
        self.rows: dict[RequestId, tuple[int, int, bool, bool]] = {}

    @rule(rid=IDS, n_tokens=st.integers(1, 20), cached=st.integers(-1, 19), ready=st.booleans())
    def push(self, rid: RequestId, n_tokens: int, cached: int, ready: bool) -> None:
        expected = ""
        if rid in self.rows:
            expected = "queued already"
        elif not 0 <= cached < n_tokens:
            expected = "at least one must be computed"
        elif len(self.rows) == 4:
            expected = "4 requests are queued, which is the limit"
        if expected:
            with pytest.raises(QueueFull if "limit" in expected else ValueError, match=expected):
                self.queue.push(rid, n_tokens=n_tokens, n_cached=cached, ready=ready)
            return
        self.queue.push(rid, n_tokens=n_tokens, n_cached=cached, ready=ready)
        self.rows[rid] = (n_tokens, cached, ready, False)

    @rule(rid=IDS)
    def ready(self, rid: RequestId) -> None:
        assert self.queue.ready(rid) == (rid in self.rows)
        if rid in self.rows:
            n_tokens, position, _, started = self.rows[rid]
            self.rows[rid] = (n_tokens, position, True, started)

    @rule(rid=IDS, cached=st.integers(0, 19))
    def rebase(self, rid: RequestId, cached: int) -> None:
        if rid in self.rows:
            n_tokens, _, ready, started = self.rows[rid]
            if started or cached >= n_tokens:
                with pytest.raises(ValueError, match=r"partly computed, up to|at least one must"):
                    self.queue.rebase(rid, cached)
                return
            self.rows[rid] = (n_tokens, cached, ready, started)
        assert self.queue.rebase(rid, cached) == (rid in self.rows)

    @rule(rid=IDS)
    def remove(self, rid: RequestId) -> None:
        assert self.queue.remove(rid) == (self.rows.pop(rid, None) is not None)

    @rule(removed=st.none() | IDS)
    def run_a_batch(self, removed: RequestId | None) -> None:
        batch = self.queue.next_batch()
        assert batch == self.queue.next_batch()
        room = 7
        expected = []
        for rid, (n_tokens, position, ready, _) in self.rows.items():
            if ready and room:
                n = min(room, n_tokens - position)
                expected.append(PrefillChunk(rid, position, n, position + n == n_tokens))
                room -= n
        assert batch == expected
        if removed is not None:
            self.remove(removed)
        self.queue.advance(batch)
        for chunk in batch:
            if chunk.request_id not in self.rows:
                continue
            if chunk.last:
                del self.rows[chunk.request_id]
            else:
                n_tokens = self.rows[chunk.request_id][0]
                self.rows[chunk.request_id] = (n_tokens, chunk.stop, True, True)

    @invariant()
    def sums_agree(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.rows)
        assert self.queue.queued_tokens == sum(n - p for n, p, _, _ in self.rows.values())


TestQueueAgainstList = QueueAgainstList.TestCase
TestQueueAgainstList.settings = settings(max_examples=40, deadline=None)
