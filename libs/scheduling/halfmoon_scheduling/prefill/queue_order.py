"""Register the orders of requests of equal priority in a prefill queue.

The slack of a request is the time until its deadline less the predicted seconds of its own
prefill: so long can it wait and still be in time. Its start is due when its slack is used up. Order
`slack` computes the request first whose start is due first. Slack shrinks equally fast for all that
wait, so the order is fixed when they arrive: two prompts never take turns.

A start is due at the arrival at the earliest, and `MAX_SLACK_S` later at the latest. So a request
goes before all of its priority that arrive after its start is due: no request starves. One that
can't be in time any more goes before none that came before it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from halfmoon_scheduling.registry import Registry

#: Slack at the most, and the slack of a request without a deadline.
MAX_SLACK_S = 60.0

#: Returns when a start is due, given the arrival, the deadline (both seconds on the queue's clock;
#: None: no deadline) and the predicted seconds of the request's own prefill.
StartDue = Callable[[float, float | None, float], float]


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """An order of requests of equal priority; of equal ones the earlier arrival goes first."""

    #: The name in settings, options and reports.
    name: str
    #: One line for help texts.
    summary: str
    start_due_s: StartDue


def _always(arrived_s: float, deadline_s: float | None, rest_s: float) -> float:
    return 0.0


def _when_slack_is_used_up(arrived_s: float, deadline_s: float | None, rest_s: float) -> float:
    slack_s = MAX_SLACK_S if deadline_s is None else deadline_s - rest_s - arrived_s
    return arrived_s + min(MAX_SLACK_S, max(0.0, slack_s))


#: All orders.
QUEUE_ORDERS: Registry[QueueOrder] = Registry("queue order")
for _order in (
    QueueOrder("arrival", "the earlier arrival first", _always),
    QueueOrder("slack", "the least slack until its deadline first", _when_slack_is_used_up),
):
    QUEUE_ORDERS.register(_order)
