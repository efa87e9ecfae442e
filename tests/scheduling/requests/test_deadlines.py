from random import Random

from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.request_state import RequestState
from halfmoon_testing.scheduling_inputs import a_request

NEVER = float("inf")


def a_request_state(sequence: int) -> RequestState:
    return RequestState(a_request(f"cmpl-{sequence}"), sequence, arrived_s=0.0)


def test_the_due_come_in_the_order_of_their_arrival_and_once() -> None:
    deadlines = Deadlines()
    first, second, third = (a_request_state(i) for i in range(3))
    deadlines.set(second, 1.0)
    deadlines.set(first, 2.0)
    deadlines.set(third, 3.0)
    assert deadlines.pop_due(0.9) == []
    assert deadlines.pop_due(2.0) == [first, second]
    assert deadlines.pop_due(2.0) == []
    assert deadlines.pop_due(9.0) == [third]


def test_only_the_latest_deadline_of_a_request_counts() -> None:
    deadlines = Deadlines()
    request = a_request_state(1)
    for deadline_s in (1.0, 5.0, 1.0, NEVER, 5.0, 3.0):
        deadlines.set(request, deadline_s)
        deadlines.check([request])
    assert deadlines.pop_due(2.0) == []
    assert deadlines.pop_due(3.0) == [request]
    assert deadlines.pop_due(9.0) == []


def test_many_changes_agree_with_a_list_and_what_is_out_of_date_does_not_pile_up() -> None:
    deadlines, dice = Deadlines(), Random(5)
    requests = [a_request_state(i) for i in range(50)]
    wanted: dict[int, float] = {}
    for now in range(3000):
        request = dice.choice(requests)
        wanted[request.sequence] = dice.choice([NEVER, now + dice.uniform(0, 200)])
        deadlines.set(request, wanted[request.sequence])
        due = sorted(i for i, deadline_s in wanted.items() if deadline_s <= now)
        assert [request.sequence for request in deadlines.pop_due(now)] == due
        for i in due:
            wanted[i] = NEVER
        deadlines.check(requests)  # bounded, too
