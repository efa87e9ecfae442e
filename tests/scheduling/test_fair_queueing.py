"""Tenants share a queue equally, whatever one of them sends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.fair_queueing import FairRoom, FairShares, FairTag
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue, QueueFull

TENANTS = ("", "a", "b")


def served(arrivals: list[tuple[str, int]], shares: FairShares) -> list[tuple[str, int]]:
    """Return work that is all there at once, in the order in which it is served."""
    tags = [(shares.tag(tenant, work).finish, i) for i, (tenant, work) in enumerate(arrivals)]
    return [arrivals[i] for _, i in sorted(tags)]


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 100)), max_size=60))
def test_each_tenant_with_a_backlog_is_served_equal_work_and_in_its_own_order(
    arrivals: list[tuple[str, int]],
) -> None:
    order = served(arrivals, FairShares(credit=0))
    for tenant in TENANTS:
        own = [work for name, work in arrivals if name == tenant]
        assert [work for name, work in order if name == tenant] == own
    left = {name: sum(work for each, work in arrivals if each == name) for name in TENANTS}
    done = dict.fromkeys(TENANTS, 0)
    for name, work in order:
        left[name] -= work
        done[name] += work
        behind = [done[each] for each in TENANTS if left[each]]
        assert not behind or max(done.values()) - min(behind) <= 200


def test_an_idle_tenant_gets_no_credit_for_the_time_it_asked_for_nothing() -> None:
    shares = FairShares(credit=0)
    for _ in range(10):
        shares.on_served(shares.tag("a", 100))
    assert shares.tag("b", 100).start == shares.tag("a", 100).start - 100


def test_a_tenant_that_was_idle_goes_before_a_backlog_until_its_credit_is_used_up() -> None:
    shares = FairShares(credit=250)
    for _ in range(10):
        shares.on_served(shares.tag("flood", 100))
    arrivals = [("flood", 100)] * 10 + [("b", 100)] * 5
    order = [name for name, _ in served(arrivals, shares)]
    assert order[:2] == ["b", "b"]
    assert order[2:8].count("b") == 3
    assert order[-5:] == ["flood"] * 5


def test_work_that_turns_out_to_be_more_puts_off_what_follows() -> None:
    shares = FairShares(credit=0)
    shares.on_served(shares.tag("a", 10))
    shares.settle("a", 200)
    assert [name for name, _ in served([("a", 10), ("b", 150)], shares)] == ["b", "a"]
    shares.settle("stranger", 5)
    assert shares.tag("stranger", 1).start == 0


def test_tenants_without_work_are_forgotten() -> None:
    shares = FairShares(credit=0)
    for number in range(10_000):
        shares.on_served(shares.tag(f"tenant-{number}", 1))
        shares.on_served(FairTag(start=number))
    assert len(shares._finishes) < 2000


def test_a_room_that_one_tenant_fills_has_a_share_for_another() -> None:
    room = FairRoom()
    for _ in range(10):
        room.enter("flood")
    room.enter("b")
    assert room.is_within_share("b", 10)
    assert not room.is_within_share("flood", 10)
    room.leave("b")
    assert room.is_within_share("flood", 10)


def test_a_flood_delays_another_tenants_prompt_by_one_pass() -> None:
    queue = PrefillQueue(chunk_tokens=100, max_requests=1000)
    for number in range(500):
        queue.push(RequestId(f"flood-{number}"), n_tokens=400, n_cached=0, tenant="flood")
    queue.advance(queue.next_batch())
    queue.push(RequestId("honest"), n_tokens=100, n_cached=0, tenant="b")
    (chunk,) = queue.next_batch()
    assert (chunk.request_id, chunk.last) == ("honest", True)
    queue.check()


def test_a_full_prefill_queue_takes_a_tenant_with_less_than_its_share() -> None:
    queue = PrefillQueue(chunk_tokens=100, max_requests=4)
    for number in range(4):
        queue.push(RequestId(f"flood-{number}"), n_tokens=10, n_cached=0, tenant="flood")
    with pytest.raises(QueueFull):
        queue.push(RequestId("flood-4"), n_tokens=10, n_cached=0, tenant="flood")
    queue.push(RequestId("honest"), n_tokens=10, n_cached=0, tenant="b")
    assert len(queue) == 5
    queue.check()
