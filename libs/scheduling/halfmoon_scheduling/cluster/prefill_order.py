"""Keep prefill workers in the order in which they would start and compute a request.

A queue that runs has an absolute end, which stays the same while time passes. One that is empty, or
whose first request is overdue, has a length that stays the same. So there are two orders, and a
worker changes from the first to the second when its first request is overdue. Between events
nothing else moves.

Workers with the same queue and the same cost are twins: only their names differ. They are one item,
so a cluster of thousands of idle workers is one item too.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost
from halfmoon_scheduling.cluster.linear_order import LinearOrder, OrderedItem, Triple

#: Tokens of a usual prompt, for the order of costs.
_USUAL_TOKENS = 8192.0


class PrefillQueueState(NamedTuple):
    """All that the predictions of a prefill worker depend on, except its name."""

    #: As in the pool's books; `head_ends_s` is minus infinity once the first request is overdue.
    behind_s: float
    head_ends_s: float
    foreign_tokens: int
    #: Seconds of the foreign tokens.
    foreign_s: float
    #: Observed over predicted seconds.
    scale: float
    cost: PrefillCost


@dataclass(slots=True, eq=False)
class PrefillTwins(OrderedItem):
    """Prefill workers that predictions can't tell apart; `value` is a queue's end or length."""

    state: PrefillQueueState | None = None
    #: By their ids; never empty.
    members: list[WorkerId] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Return whether the queue gets shorter as time passes."""
        return self.state is not None and self.state.head_ends_s > -inf


class PrefillOrder:
    """Find the prefill workers that bring a first token soonest."""

    def __init__(self) -> None:
        """Start without workers."""
        usual = (1.0, _USUAL_TOKENS, _USUAL_TOKENS * _USUAL_TOKENS)
        #: By the absolute end of the queue, and by its length.
        self._running: LinearOrder[PrefillTwins] = LinearOrder(usual)
        self._still: LinearOrder[PrefillTwins] = LinearOrder(usual)
        self._twins: dict[PrefillQueueState, PrefillTwins] = {}
        self._by_worker: dict[WorkerId, PrefillTwins] = {}
        #: When the first request of running queues is overdue; also of twins that are gone.
        self._overdue: list[tuple[float, int, PrefillTwins]] = []
        self._n_made = 0

    def put(self, worker_id: WorkerId, state: PrefillQueueState) -> None:
        """Add a worker, or change its place."""
        before = self._by_worker.get(worker_id)
        if before is not None:
            if before.state == state:
                return
            self.discard(worker_id)
        if (twins := self._twins.get(state)) is None:
            twins = self._make(state)
        insort(twins.members, worker_id)
        self._by_worker[worker_id] = twins

    def discard(self, worker_id: WorkerId) -> None:
        """Remove a worker, if it is here."""
        if (twins := self._by_worker.pop(worker_id, None)) is None:
            return
        del twins.members[bisect_left(twins.members, worker_id)]
        if not twins.members:
            assert twins.state is not None
            del self._twins[twins.state]
            (self._running if twins.runs else self._still).remove(twins)

    def overdue(self, now: float) -> Iterator[WorkerId]:
        """Yield the workers whose first request is overdue since the last call; put each anew."""
        while self._overdue and self._overdue[0][0] <= now:
            yield from list(heappop(self._overdue)[2].members)

    def search(
        self,
        weights: Triple,
        extra_s: float,
        limit_s: float,
        now: float,
        see: Callable[[PrefillTwins], float],
    ) -> float:
        """Call `see` for all twins whose predicted seconds may be within a limit.

        Args:
            weights: of the request: of its passes, its tokens, and tokens times context.
            extra_s: seconds that every worker needs besides, such as for a transfer.
            limit_s: the limit at first.
            now: seconds.
            see: returns the limit from then on.

        Returns:
            The limit at the end.
        """
        limit_s = self._still.search(weights, -extra_s, limit_s, see)
        return self._running.search(weights, now - extra_s, limit_s, see)

    def _make(self, state: PrefillQueueState) -> PrefillTwins:
        scale, cost = state.scale, state.cost
        value = state.behind_s + state.foreign_s
        runs = state.head_ends_s > -inf
        if runs:
            value += state.head_ends_s
        slopes = (scale * cost.c0_s, scale * cost.c1_s, scale * cost.c2_s)
        twins = self._twins[state] = PrefillTwins(value, slopes, state=state)
        (self._running if runs else self._still).add(twins)
        if runs:
            self._n_made += 1
            heappush(self._overdue, (state.head_ends_s, self._n_made, twins))
            if len(self._overdue) > 2 * len(self._by_worker) + 64:
                self._overdue = [one for one in self._overdue if one[2].members]
                heapify(self._overdue)
        return twins

    def check(self, states: Mapping[WorkerId, PrefillQueueState], besides: Set[WorkerId]) -> None:
        """Check that exactly these workers are here, each with its state, besides others."""
        here = {w: twins.state for w, twins in self._by_worker.items() if w not in besides}
        assert here == states
        assert sum(len(t.members) for t in self._twins.values()) == len(self._by_worker)
        assert all(t.members == sorted(t.members) for t in self._twins.values())
        assert len(self._running) + len(self._still) == len(self._twins)
        awaited = {id(twins) for _, _, twins in self._overdue}
        assert all(id(t) in awaited for t in self._twins.values() if t.runs)
        self._running.check()
        self._still.check()
