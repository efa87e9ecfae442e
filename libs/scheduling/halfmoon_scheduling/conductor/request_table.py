"""Hold the requests that are not over, with all that each of them waits for or holds.

What a request holds at workers is in the books of `Cluster` until `release` takes it out.
"""

from collections import Counter

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_scheduling.admission.late_admission import LateAdmission
from halfmoon_scheduling.admission.limit_bounds import LimitBounds
from halfmoon_scheduling.admission.page_queue import PageQueue
from halfmoon_scheduling.admission.quarantine import Quarantine
from halfmoon_scheduling.admission.rank_queue import RankQueue
from halfmoon_scheduling.admission.slos import Slos
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.conductor.decode_shares import DecodeShares
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.fair_queueing import BURST_TOKENS, FairRoom, FairShares
from halfmoon_scheduling.requests.deadlines import Deadlines
from halfmoon_scheduling.requests.orphaned_landings import OrphanedLandings
from halfmoon_scheduling.requests.request_state import (
    PREFILLED,
    UNPLACED,
    Phase,
    RequestState,
)

#: Tokens of an answer before any has ended, and the weight of each that ends.
_FIRST_MEAN_NEW = 256.0
_MEAN_WEIGHT = 1 / 64


class RequestTable:
    """Track requests from their arrival until they are over."""

    def __init__(
        self,
        config: SchedulingConfig,
        cluster: Cluster,
        slos: Slos,
        bounds: LimitBounds | None = None,
    ) -> None:
        """Create a table without requests."""
        self._config = config
        self._cluster = cluster
        #: In the order of arrival.
        self._requests: dict[RequestId, RequestState] = {}
        self._n_arrived = 0
        #: Of the queues for pages and admission, in tokens of prompts and answers.
        self._fair_shares = FairShares(BURST_TOKENS)
        #: Tokens of an answer, of late.
        self._mean_new = _FIRST_MEAN_NEW
        #: All requests that are not over.
        self._fair_room = FairRoom()
        #: Exactly the requests that are at workers, or on their way there.
        self.decode_shares = DecodeShares()
        #: Of all requests; what a deadline leads to depends on the phase.
        self.deadlines = Deadlines()
        #: Exactly those in phase WAITING.
        self.waiting = PageQueue(cluster.decodes)
        #: Exactly those in phase DEFERRED.
        self.deferred = RankQueue()
        #: Those in phase QUARANTINED, and all suspects that are at workers.
        self.quarantine = Quarantine()
        #: Exactly those in phase LANDED.
        self.late_admission = LateAdmission(config, slos, cluster.decodes, self.deadlines, bounds)
        #: Of requests that are over, so of none that is in the table.
        self.orphaned = OrphanedLandings(cluster)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def get(self, request_id: RequestId) -> RequestState | None:
        """Return a request, if it is not over."""
        return self._requests.get(request_id)

    def __getitem__(self, request_id: RequestId) -> RequestState:
        return self._requests[request_id]

    def all(self) -> list[RequestState]:
        """Return a copy of the requests in the order of their arrival: they may end meanwhile."""
        return list(self._requests.values())

    @property
    def is_empty(self) -> bool:
        """True without any request or orphaned landing."""
        return not self._requests and not self.orphaned

    @property
    def n_without_token(self) -> int:
        """Requests that wait for their first token, in any phase before decoding."""
        return len(self._requests) - self._cluster.decodes.n_running

    @property
    def counts(self) -> dict[str, int]:
        """Requests by phase, and orphaned landings under "stopping"."""
        counts = Counter(state.phase for state in self._requests.values())
        return {phase.value: counts[phase] for phase in Phase} | {"stopping": len(self.orphaned)}

    def is_within_share(self, state: RequestState, limit: int) -> bool:
        """Return whether the tenant of a request has no more than an equal share of so many."""
        return self._fair_room.is_within_share(state.request.tenant, limit)

    def to_make_room(self) -> RequestState | None:
        """Return the request that is to be stopped for the first one that waits for pages."""
        first, shortage = self.waiting.first, self.waiting.shortage
        if first is None or shortage is None:
            return None
        state = self._requests[first[-1]]
        if not self._fair_shares.is_within_share(state.fair):
            return None
        return self.decode_shares.choose(state, shortage, self.orphaned.decodes)

    def busy_workers(self) -> frozenset[WorkerId]:
        """Return the workers that compute requests, or are about to."""
        placed = [state for state in self._requests.values() if state.phase not in UNPLACED]
        writers = (w for s in placed if s.phase not in PREFILLED for w in s.writers)
        return frozenset((*writers, *(s.decode for s in placed if s.decode is not None)))

    # -- changes -----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> RequestState:
        """Add a request that has arrived."""
        self._n_arrived += 1
        n_new = self._n_expected(request)
        if request.attempt > 1:
            fair, charged = self._fair_shares.paid_tag(), 0
        else:
            charged = len(request.token_ids) + n_new
            fair = self._fair_shares.tag(request.tenant, charged)
        state = RequestState(
            request, self._n_arrived, arrived_s=now, fair=fair, charged=charged, n_expected=n_new
        )
        self._requests[request.request_id] = state
        self._fair_room.enter(request.tenant)
        return state

    def on_finished(self, state: RequestState, n_new: int) -> None:
        """Count the tokens of an answer, in place of those that were expected.

        Args:
            state: of the request.
            n_new: tokens of its last try; 0: not known.
        """
        if not n_new:
            return
        self._mean_new += (n_new - self._mean_new) * _MEAN_WEIGHT
        more = n_new - state.n_expected if state.charged else n_new
        self._fair_shares.settle(state.request.tenant, more)

    def _n_expected(self, request: Request) -> int:
        """Return the new tokens that a tenant's share is charged with when a request arrives.

        What a request declares is a limit, mostly far above its answer: charged with that, a
        tenant with one request would have had more than its share.
        """
        return min(request.stopping.max_new_tokens, round(self._mean_new))

    def on_placed(self, state: RequestState) -> None:
        """Note that a request leaves the queues for its workers."""
        self._fair_shares.on_served(state.fair)
        self.decode_shares.enter(state)

    def leave_queues(self, state: RequestState) -> None:
        """Remove a request from the queue that it waits in, if it waits."""
        if state.phase is Phase.WAITING:
            self.waiting.remove(state.rank)
        if state.phase is Phase.QUARANTINED:
            self.quarantine.remove(state)
        if state.phase is Phase.DEFERRED:
            self.deferred.remove(state.rank)
        if state.phase is Phase.LANDED:
            self.late_admission.remove(state)

    def release(self, state: RequestState, now: float, *, keep_landing: bool = False) -> None:
        """Take a request's claims on workers out of the books.

        Args:
            state: the request.
            now: seconds.
            keep_landing: leave the claim on decode in place, for an `OrphanedLanding`.
        """
        self.quarantine.end(state)
        self.decode_shares.leave(state)
        if state.prefill is not None:
            self._cluster.prefills.release(state.prefill, state.request_id, now)
        if state.decode is not None and not keep_landing:
            self.late_admission.notify(state.decode)
            self._cluster.decodes.release(state.decode, state.request_id)

    def discard(self, state: RequestState) -> None:
        """Remove a request that holds nothing; its tenant has not had what it was charged."""
        self._fair_shares.settle(state.request.tenant, -state.charged)
        self.leave_queues(state)
        self._forget(state)

    def remove(self, state: RequestState, now: float, *, keep_landing: bool = False) -> None:
        """Remove a request and release what it holds; `keep_landing` as in `release`."""
        if not state.n_placements:
            self._fair_shares.settle(state.request.tenant, -state.charged)
        self.leave_queues(state)
        self.release(state, now, keep_landing=keep_landing)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        self.deadlines.set(state, float("inf"))
        self._fair_room.leave(state.request.tenant)
        del self._requests[state.request_id]

    # -- audit -------------------------------------------------------------------------------

    def check(self) -> None:
        """Audit: phases, queues and the cluster's books agree, and all workers are live."""
        self._check_queues()
        n_decoding = sum(s.phase is Phase.DECODING for s in self._requests.values())
        assert self.n_without_token == len(self._requests) - n_decoding
        self.deadlines.check(self.all())
        assert not self._requests.keys() & set(self.orphaned)
        self._check_claims()
        self.decode_shares.check([s for s in self.all() if s.phase not in UNPLACED])

    def _check_queues(self) -> None:
        for phase, queue in ((Phase.WAITING, self.waiting), (Phase.DEFERRED, self.deferred)):
            queue.check()
            ranks = {s.rank for s in self._requests.values() if s.phase is phase}
            assert set(queue) == ranks
            assert len(queue) == len(ranks), "a request waits twice"
        assert len(self.deferred) <= self._config.deferred_at_most
        self.late_admission.check([s for s in self.all() if s.phase is Phase.LANDED])
        quarantined = {s.request_id for s in self.all() if s.phase is Phase.QUARANTINED}
        self.quarantine.check(self.all(), quarantined)

    def _check_claims(self) -> None:
        planned: dict[WorkerId, set[RequestId]] = {}
        held = self.orphaned.held()
        for request_id, state in self._requests.items():
            if state.phase in UNPLACED:
                assert state.placement is None
                continue
            assert state.writers or state.prefill == state.decode
            assert state.decode is not None
            held.setdefault(state.decode, set()).add(request_id)
            if state.phase not in PREFILLED:
                for writer in state.writers:
                    planned.setdefault(writer, set()).add(request_id)
        for info in self._cluster.workers():
            if info.role == "prefill":
                assert self._cluster.prefills.requests(info.worker_id) == planned.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s queue"
            elif info.role == "decode":
                assert self._cluster.decodes.requests(info.worker_id) == held.pop(
                    info.worker_id, set()
                ), f"{info.worker_id}'s claims"
        assert not planned and not held, "a request is on a worker that is not here"
