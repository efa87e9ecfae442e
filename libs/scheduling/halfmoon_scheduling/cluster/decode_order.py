"""Keep decode workers in the order of their predicted steps, with the room that they have.

Workers with the same step, requests and pages are twins: only their names differ, and they are one
item. The choice is that of `halfmoon_scheduling.placement.decode_choice:choose_decode`, which
visits all workers.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import WorkerId
from halfmoon_scheduling.cluster.linear_order import LinearOrder, OrderedItem
from halfmoon_scheduling.placement.estimates import DecodeCandidate

#: What twins have in common: step and seconds per token, requests, free pages.
_State = tuple[float, float, int, int]


@dataclass(slots=True, eq=False)
class DecodeTwins(OrderedItem):
    """Decode workers that placement can't tell apart; `value` is their step."""

    state: _State = (0.0, 0.0, 0, 0)
    #: By their ids; never empty.
    members: list[WorkerId] = field(default_factory=list)


class DecodeOrder:
    """Find the decode worker with room that has the shortest step."""

    def __init__(self) -> None:
        """Start without workers."""
        #: Twins by the free pages that they have, in powers of two: class k has 2^(k-1) to 2^k - 1.
        self._orders: dict[int, LinearOrder[DecodeTwins]] = {}
        self._twins: dict[_State, DecodeTwins] = {}
        self._by_worker: dict[WorkerId, DecodeTwins] = {}

    def put(self, candidate: DecodeCandidate) -> None:
        """Add a worker, or change its place."""
        worker_id = candidate.worker_id
        state = (
            candidate.step_s,
            candidate.per_token_s,
            candidate.n_requests,
            candidate.free_pages,
        )
        before = self._by_worker.get(worker_id)
        if before is not None:
            if before.state == state:
                return
            self.discard(worker_id)
        if (twins := self._twins.get(state)) is None:
            slopes, tie = (state[1], 0.0, 0.0), (state[2], -state[3])
            twins = self._twins[state] = DecodeTwins(state[0], slopes, tie, state=state)
            size = _size(state[3])
            if (order := self._orders.get(size)) is None:
                order = self._orders[size] = LinearOrder((1.0, 0.0, 0.0))
            order.add(twins)
        insort(twins.members, worker_id)
        self._by_worker[worker_id] = twins

    def discard(self, worker_id: WorkerId) -> None:
        """Remove a worker, if it is here."""
        if (twins := self._by_worker.pop(worker_id, None)) is None:
            return
        del twins.members[bisect_left(twins.members, worker_id)]
        if not twins.members:
            del self._twins[twins.state]
            size = _size(twins.state[3])
            self._orders[size].remove(twins)
            if not self._orders[size]:
                del self._orders[size]

    def choose(
        self,
        n_pages: int,
        n_tokens: int,
        may_ask: Callable[[WorkerId], bool],
        pages_at: WorkerId | None = None,
    ) -> tuple[WorkerId | None, float]:
        """Return the decode worker that `choose_decode` would choose, and its predicted TBT.

        Args:
            n_pages: pages that it must have free.
            n_tokens: tokens of the request's context.
            may_ask: whether a worker may be asked for as many pages.
            pages_at: the worker that may have pages of the prompt's prefix.
        """
        best: tuple[float, int, int, WorkerId] | None = None

        def see(twins: DecodeTwins) -> float:
            nonlocal best
            step_s, per_token_s, n_requests, free_pages = twins.state
            if free_pages >= n_pages:
                tbt_s = step_s + per_token_s * n_tokens
                rank = (tbt_s, n_requests, -free_pages)
                if best is None or rank <= best[:3]:
                    for worker_id in twins.members:
                        if may_ask(worker_id):
                            found = (*rank, worker_id)
                            best = found if best is None else min(best, found)
                            break
            return inf if best is None else best[0]

        limit, weights = inf, (float(n_tokens), 0.0, 0.0)
        for size, order in self._orders.items():
            if 1 << size > n_pages:  # else none of them has so many pages
                limit = order.search(weights, 0.0, limit, see)
        if best is None:
            return None, 0.0
        if pages_at is not None and (twins := self._by_worker.get(pages_at)) is not None:
            step_s, per_token_s, n_requests, free_pages = twins.state
            is_equal = (step_s + per_token_s * n_tokens, n_requests) == best[:2]
            if is_equal and free_pages >= n_pages and may_ask(pages_at):
                return pages_at, best[0]
        return best[3], best[0]

    def check(self, candidates: Mapping[WorkerId, DecodeCandidate], besides: Set[WorkerId]) -> None:
        """Check that exactly these workers are here, each with its state, besides others."""
        assert self._by_worker.keys() - besides == candidates.keys()
        for worker_id, c in candidates.items():
            twins = self._by_worker[worker_id]
            assert twins.state == (c.step_s, c.per_token_s, c.n_requests, c.free_pages)
            assert worker_id in twins.members and twins.members == sorted(twins.members)
        assert sum(map(len, self._orders.values())) == len(self._twins)
        for order in self._orders.values():
            order.check()


def _size(free_pages: int) -> int:
    """Return the class of a number of free pages, which claims can make negative."""
    return max(0, free_pages).bit_length()
