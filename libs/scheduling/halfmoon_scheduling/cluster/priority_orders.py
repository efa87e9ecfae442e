"""Keep an order of prefill workers for each priority of requests that are placed.

A request of larger priority than some that are queued waits for a part of each queue. So the
soonest worker is another one, and another order finds it. Orders are made when a request needs
them, and dropped when none did for a while. Most clusters need one: that of whole queues.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.cluster.prefill_order import PrefillOrder, PrefillQueueState

#: Orders besides that of whole queues: each one costs as much per changed worker.
MAX_ORDERS = 4
#: Seconds after its last use in which an order gives its place to no other.
KEPT_S = 60.0

#: A worker's queue as requests of a priority see it at a time; None: it is in no order.
StateOf = Callable[[WorkerId, int | None, float], PrefillQueueState | None]


@dataclass(slots=True)
class _Kept:
    """An order, as the workers were but for those in `changed`."""

    changed: set[WorkerId]
    order: PrefillOrder = field(default_factory=PrefillOrder)
    #: When it was brought up to date, and used.
    settled_s: float = -inf


class PriorityOrders:
    """Hold the orders of one pool of prefill workers."""

    def __init__(self, state_of: StateOf) -> None:
        """Start without workers."""
        self._state_of = state_of
        #: By the priority of requests; None: of those that wait for whole queues. Always here.
        self._kept: dict[int | None, _Kept] = {None: _Kept(set())}

    def note(self, worker_id: WorkerId) -> None:
        """Note that a worker has joined or changed."""
        for kept in self._kept.values():
            kept.changed.add(worker_id)

    def drop(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone."""
        for kept in self._kept.values():
            kept.order.discard(worker_id)
            kept.changed.discard(worker_id)

    def find(
        self, priority: int | None, workers: Iterable[WorkerId], now: float
    ) -> PrefillOrder | None:
        """Return the order for requests of a priority, up to date; None: too many are in use.

        Args:
            priority: of the request; None: whole queues count for it.
            workers: all of the pool, for an order that is made.
            now: seconds.
        """
        if (kept := self._kept.get(priority)) is None:
            if len(self._kept) > MAX_ORDERS:
                used_s, oldest = min(
                    (o.settled_s, p) for p, o in self._kept.items() if p is not None
                )
                if used_s + KEPT_S > now:
                    return None
                del self._kept[oldest]
            kept = self._kept[priority] = _Kept(set(workers))
        kept.settled_s = now = max(now, kept.settled_s)
        kept.changed.update(kept.order.overdue(now))
        for worker_id in kept.changed:
            if (state := self._state_of(worker_id, priority, now)) is None:
                kept.order.discard(worker_id)
            else:
                kept.order.put(worker_id, state)
        kept.changed.clear()
        return kept.order

    def check(self, workers: Iterable[WorkerId]) -> None:
        """Check that each order has the workers of a pool, as they are."""
        assert None in self._kept and len(self._kept) <= MAX_ORDERS + 1
        ids = set(workers)
        for priority, kept in self._kept.items():
            assert kept.changed <= ids
            states = {w: self._state_of(w, priority, kept.settled_s) for w in ids - kept.changed}
            settled = {w: state for w, state in states.items() if state is not None}
            kept.order.check(settled, besides=kept.changed)
