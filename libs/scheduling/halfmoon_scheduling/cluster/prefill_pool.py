"""Track the queue of each prefill worker.

A queue consists of our own requests that have not ended, and of other conductors' tokens. The
worker reports all queued tokens; those beyond ours are other conductors'. Queued time is kept as a
sum, so that reading it does not visit the queue. An order of all workers is kept up to date with
what has changed, whenever placement asks for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost, PrefillLoad, WorkerInfo
from halfmoon_scheduling.cluster.linear_order import Triple
from halfmoon_scheduling.cluster.prefill_order import (
    PrefillOrder,
    PrefillQueueState,
    PrefillTwins,
)
from halfmoon_scheduling.placement.estimates import Estimate, PlacementRequest, PrefillCandidate
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate
from halfmoon_scheduling.prediction.cost_model import CostModel, unscaled_prefill_s


@dataclass(slots=True)
class _Planned:
    """A request's place in a prefill worker's queue."""

    predicted_s: float
    n_computed: int
    #: The kvstore that it reads from over the network, if any.
    source: WorkerId | None
    #: At the first stage of a group: the workers of the other stages, with claims of their own.
    others: tuple[WorkerId, ...] = ()
    #: When its prefill worker was told to start.
    started_s: float = inf


@dataclass(slots=True)
class _Prefill:
    info: WorkerInfo
    cost: PrefillCost
    #: Our requests there, including reserving ones, in the order in which they will run.
    planned: dict[RequestId, _Planned] = field(default_factory=dict)
    #: Sum of `n_computed` of all of `planned`.
    planned_tokens: int = 0
    #: Predicted seconds of all of `planned` except the first; 0 without others.
    behind_s: float = 0.0
    #: When the first of `planned` should end; minus infinity without one.
    head_ends_s: float = -inf
    #: When a request last left the queue that the worker has computed, or had begun to.
    last_computed_s: float = -inf
    #: When the worker last answered that a request is done or failed.
    last_answer_s: float = -inf
    #: Queued tokens of other conductors.
    foreign_tokens: int = 0


class PrefillPool:
    """Track live prefill workers and the requests planned at each."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._workers: dict[WorkerId, _Prefill] = {}
        #: Reads planned or under way at each kvstore; no value is 0.
        self.transfers: dict[WorkerId, int] = {}
        #: The workers that take whole prompts, as they were but for those in `_changed`.
        self._order = PrefillOrder()
        self._changed: set[WorkerId] = set()
        #: When the order was brought up to date.
        self._settled_s = -inf

    # -- live workers ------------------------------------------------------------------------

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._workers)

    def join(self, info: WorkerInfo) -> None:
        """Add a worker, or update its record; its queue stays."""
        cost = info.prefill_cost or PrefillCost()
        if (worker := self._workers.get(info.worker_id)) is None:
            self._workers[info.worker_id] = _Prefill(info, cost)
        else:
            worker.info, worker.cost = info, cost
        self._changed.add(info.worker_id)

    def leave(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone, with its queue."""
        for request_id in list(self._workers[worker_id].planned):
            self.release(worker_id, request_id, now=0.0)
        del self._workers[worker_id]
        self._order.discard(worker_id)
        self._changed.discard(worker_id)

    def takes_work(self, worker_id: WorkerId) -> bool:
        """Return whether a worker is live and takes new work, perhaps of its group only."""
        worker = self._workers.get(worker_id)
        return worker is not None and not worker.info.draining

    def takes_whole_prompts(self, worker_id: WorkerId) -> bool:
        """Return whether a worker is live and takes new work by itself."""
        worker = self._workers.get(worker_id)
        return worker is not None and _takes_whole_prompts(worker.info)

    def candidate(self, worker_id: WorkerId, home: WorkerId | None, now: float) -> PrefillCandidate:
        """Return the candidate of a live worker."""
        worker = self._workers[worker_id]
        return PrefillCandidate(worker_id, worker.cost, home, self._queue_s(worker, now))

    def search(
        self,
        weights: Triple,
        extra_s: float,
        limit_s: float,
        now: float,
        see: Callable[[PrefillTwins], float],
    ) -> float:
        """Visit the workers that take work and may be soon enough; see `PrefillOrder.search`."""
        self._settle(now)
        return self._order.search(weights, extra_s, limit_s, now, see)

    def candidates(
        self,
        workers: Iterable[WorkerInfo],
        homes: Mapping[WorkerId, WorkerId | None],
        now: float,
    ) -> list[PrefillCandidate]:
        """Return the candidates of these workers, with their homes."""
        made = []
        for info in workers:
            made.append(self.candidate(info.worker_id, homes[info.worker_id], now))
        return made

    # -- claims ------------------------------------------------------------------------------

    def plan(self, chosen: Estimate, job: PlacementRequest, now: float) -> None:
        """Queue a request at the chosen worker or group, behind earlier ones."""
        source = chosen.source if chosen.transfer_blocks else None
        if source is not None:
            self.transfers[source] = self.transfers.get(source, 0) + 1
        n_computed = job.n_tokens - chosen.n_blocks * job.block_size
        first, *others = chosen.workers
        stage_s = chosen.stage_s if isinstance(chosen, GroupEstimate) else (chosen.prefill_s,)
        planned = _Planned(stage_s[0], n_computed, source, tuple(others))
        self._queue(first, job.request_id, planned, now)
        for other, seconds in zip(others, stage_s[1:], strict=True):
            self._queue(other, job.request_id, _Planned(seconds, n_computed, None), now)

    def start(self, worker_id: WorkerId, request_id: RequestId, now: float) -> None:
        """Record that a worker was told to prefill a request."""
        self._workers[worker_id].planned[request_id].started_s = now

    def on_answer(self, worker_id: WorkerId, now: float) -> None:
        """Record that a worker has finished a request, so it does not hang."""
        self._workers[worker_id].last_answer_s = now

    def hangs(self, worker_id: WorkerId, request_id: RequestId) -> bool:
        """Return whether a live worker has finished no request since it was told of this one."""
        worker = self._workers[worker_id]
        return worker.last_answer_s < worker.planned[request_id].started_s

    def busy_s(self, worker_id: WorkerId, request_id: RequestId, now: float) -> float:
        """Return the most seconds for which a request that is done now kept its worker busy.

        They count from its start, or from when the computed request before it left; 0 if both
        shared their last pass.
        """
        worker = self._workers[worker_id]
        return max(0.0, now - max(worker.planned[request_id].started_s, worker.last_computed_s))

    def release(self, worker_id: WorkerId, request_id: RequestId, now: float) -> None:
        """Remove a request from a worker's queue, and from those of its further stages."""
        worker = self._workers.get(worker_id)
        if worker is None or request_id not in worker.planned:
            return
        self._changed.add(worker_id)
        was_first = next(iter(worker.planned)) == request_id
        gone = worker.planned.pop(request_id)
        worker.planned_tokens -= gone.n_computed
        # One that decode refused, or that was cancelled in the queue, has kept no worker busy.
        if gone.started_s < inf and (was_first or worker.last_answer_s == now):
            for busy in (worker_id, *gone.others):
                if busy in self._workers:
                    self._workers[busy].last_computed_s = now
        for other in gone.others:
            self.release(other, request_id, now)
        if not was_first:
            worker.behind_s = max(0.0, worker.behind_s - gone.predicted_s)
        elif worker.planned:
            head = next(iter(worker.planned.values()))
            worker.head_ends_s = now + head.predicted_s
            worker.behind_s = max(0.0, worker.behind_s - head.predicted_s)
        if len(worker.planned) <= 1:
            worker.behind_s = 0.0  # exactly: sums of fractions drift
        if not worker.planned:
            worker.head_ends_s = -inf
        if gone.source is not None:
            self.transfers[gone.source] -= 1
            if not self.transfers[gone.source]:
                del self.transfers[gone.source]

    def _queue(self, worker_id: WorkerId, request_id: RequestId, one: _Planned, now: float) -> None:
        worker = self._workers[worker_id]
        if worker.planned:
            worker.behind_s += one.predicted_s
        else:
            worker.head_ends_s = now + one.predicted_s
            worker.behind_s = 0.0
        worker.planned[request_id] = one
        worker.planned_tokens += one.n_computed
        self._changed.add(worker_id)

    def requests(self, worker_id: WorkerId) -> set[RequestId]:
        """Return our requests at a live worker."""
        return set(self._workers[worker_id].planned)

    def queues_s(self, now: float) -> dict[WorkerId, float]:
        """Return the predicted seconds until a new request would start, at each worker."""
        return {worker_id: self._queue_s(w, now) for worker_id, w in self._workers.items()}

    def unloaded_s(self, worker_id: WorkerId, n_tokens: int) -> float:
        """Return the seconds of a prefill on an idle worker with an empty cache."""
        return self._costs.prefill_s(worker_id, self._workers[worker_id].cost, n_tokens, 0)

    def profile_s(self, chosen: Estimate, n_tokens: int) -> float | None:
        """Return the seconds to a first token by the profile alone; None: a request is ahead.

        Nothing is taken to be cached.
        """
        workers = [self._workers.get(worker_id) for worker_id in chosen.workers]
        if not workers or any(w is None or w.planned or w.foreign_tokens for w in workers):
            return None
        first = workers[0]
        assert first is not None
        return chosen.transfer_s + unscaled_prefill_s(first.cost, n_tokens, 0)

    # -- reports -----------------------------------------------------------------------------

    def on_load(self, worker_id: WorkerId, load: PrefillLoad) -> None:
        """Take over a worker's load: queued tokens beyond ours are other conductors'."""
        if (worker := self._workers.get(worker_id)) is not None:
            before = worker.foreign_tokens
            worker.foreign_tokens = max(0, load.queued_tokens - worker.planned_tokens)
            if worker.foreign_tokens != before:
                self._changed.add(worker_id)

    def check(self) -> None:
        """Check that queued time and transfers are those of the queues."""
        transfers: dict[WorkerId, int] = {}
        for worker in self._workers.values():
            planned = list(worker.planned.values())
            assert worker.planned_tokens == sum(one.n_computed for one in planned)
            assert planned or worker.head_ends_s == -inf
            behind_s = sum(one.predicted_s for one in planned[1:])
            assert abs(worker.behind_s - behind_s) <= 1e-6 * max(1.0, behind_s)
            for one in planned:
                if one.source is not None:
                    transfers[one.source] = transfers.get(one.source, 0) + 1
        assert transfers == self.transfers
        settled = {
            worker_id: self._state(worker, self._settled_s)
            for worker_id, worker in self._workers.items()
            if worker_id not in self._changed and _takes_whole_prompts(worker.info)
        }
        self._order.check(settled, besides=self._changed)

    def _settle(self, now: float) -> None:
        """Bring the order up to date."""
        self._settled_s = now = max(now, self._settled_s)
        self._changed.update(self._order.overdue(now))
        for worker_id in self._changed:
            worker = self._workers[worker_id]
            if _takes_whole_prompts(worker.info):
                self._order.put(worker_id, self._state(worker, now))
            else:
                self._order.discard(worker_id)
        self._changed.clear()

    def _state(self, worker: _Prefill, now: float) -> PrefillQueueState:
        head_ends_s = worker.head_ends_s if worker.head_ends_s > now else -inf
        scale = self._costs.scale(worker.info.worker_id)
        return PrefillQueueState(
            worker.behind_s,
            head_ends_s,
            worker.foreign_tokens,
            self._foreign_s(worker) if worker.foreign_tokens else 0.0,
            scale,
            worker.cost,
        )

    def _foreign_s(self, worker: _Prefill) -> float:
        """Return the predicted seconds of other conductors' tokens."""
        per_token = PrefillCost(0.0, worker.cost.c1_s, 0.0)
        return self._costs.prefill_s(worker.info.worker_id, per_token, worker.foreign_tokens, 0)

    def _queue_s(self, worker: _Prefill, now: float) -> float:
        """Return the predicted seconds of all queued requests, less those that have run."""
        queue_s = worker.behind_s + max(0.0, worker.head_ends_s - now)
        if worker.foreign_tokens:
            queue_s += self._foreign_s(worker)
        return queue_s


def _takes_whole_prompts(info: WorkerInfo) -> bool:
    return not info.draining and not info.stage_layers_only
