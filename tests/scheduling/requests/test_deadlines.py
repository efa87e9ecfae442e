from random import Random

from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.request_state import RequestState
from halfmoon_testing.scheduling_inputs import a_request

NEVER = float("inf")


def a_request_state(sequence: int) -> RequestState:
    return RequestState(a_request(f"cmpl-{sequence}"), sequence, arrived_s=0.0)


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
