"""Track the queue of each prefill worker.

A queue consists of our own requests that have not ended, and of other conductors' tokens. The
worker reports all queued tokens; those beyond ours are other conductors'. Queued time is kept as
sums by priority, so that reading it does not visit the queue. Orders of all workers are kept up to
date with what has changed, whenever placement asks for them.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import PrefillCost, PrefillLoad, WorkerInfo
from halfmoon_scheduling.cluster.planned_queue import PlannedQueue
from halfmoon_scheduling.cluster.prefill_order import PrefillOrder, PrefillQueueState
from halfmoon_scheduling.cluster.priority_orders import PriorityOrders
from halfmoon_scheduling.placement.estimates import Estimate, PlacementRequest, PrefillCandidate
from halfmoon_scheduling.placement.prefill_groups import GroupEstimate
from halfmoon_scheduling.prediction.cost_model import CostModel, unscaled_prefill_s


@dataclass(slots=True)
class _Planned:
    """A request's claim on a prefill worker."""

    predicted_s: float
    n_computed: int
    #: The kvstore that it reads from over the network, if any.
    source: WorkerId | None
    priority: int = 0
    #: At the first stage of a group: the workers of the other stages, with claims of their own.
    others: tuple[WorkerId, ...] = ()
    #: When its prefill worker was told to start.
    started_s: float = inf


@dataclass(slots=True)
class _Prefill:
    info: WorkerInfo
    cost: PrefillCost
    #: Our requests there, including reserving ones, as they came.
    planned: dict[RequestId, _Planned] = field(default_factory=dict)
    #: Sum of `n_computed` of all of `planned`.
    planned_tokens: int = 0
    #: Exactly those of `planned`, in the order in which they will run.
    queue: PlannedQueue = field(default_factory=PlannedQueue)
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
        #: The workers that take whole prompts.
        self._orders = PriorityOrders(self._state)
        #: Priorities of planned requests, with how many have each; and the same, sorted.
        self._n_of_priority: Counter[int] = Counter()
        self._priorities: list[int] = []

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
        self._orders.note(info.worker_id)

    def leave(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone, with its queue."""
        for request_id in list(self._workers[worker_id].planned):
            self.release(worker_id, request_id, now=0.0)
        del self._workers[worker_id]
        self._orders.drop(worker_id)

    def takes_work(self, worker_id: WorkerId) -> bool:
        """Return whether a worker is live and takes new work, perhaps of its group only."""
        worker = self._workers.get(worker_id)
        return worker is not None and not worker.info.draining

    def takes_whole_prompts(self, worker_id: WorkerId) -> bool:
        """Return whether a worker is live and takes new work by itself."""
        worker = self._workers.get(worker_id)
        return worker is not None and _takes_whole_prompts(worker.info)

    def candidate(
        self, worker_id: WorkerId, home: WorkerId | None, now: float, priority: int | None = None
    ) -> PrefillCandidate:
        """Return the candidate of a live worker for a request of a priority; None: the least."""
        worker = self._workers[worker_id]
        return PrefillCandidate(worker_id, worker.cost, home, self._queue_s(worker, now, priority))

    def order_for(self, priority: int, now: float) -> PrefillOrder | None:
        """Return the workers that take whole prompts, ordered for requests of a priority.

        None: requests of too many priorities are placed; all workers must be compared.
        """
        is_least = not self._priorities or priority <= self._priorities[0]
        return self._orders.find(None if is_least else priority, self._workers, now)

    def candidates(
        self,
        workers: Iterable[WorkerInfo],
        homes: Mapping[WorkerId, WorkerId | None],
        now: float,
        priority: int | None = None,
    ) -> list[PrefillCandidate]:
        """Return the candidates of these workers, with their homes."""
        made = []
        for info in workers:
            made.append(self.candidate(info.worker_id, homes[info.worker_id], now, priority))
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
        planned = _Planned(stage_s[0], n_computed, source, job.priority, tuple(others))
        self._queue(first, job.request_id, planned, now)
        for other, seconds in zip(others, stage_s[1:], strict=True):
            share = _Planned(seconds, n_computed, None, job.priority)
            self._queue(other, job.request_id, share, now)

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
        self._orders.note(worker_id)
        was_first = worker.queue.is_first(request_id)
        gone = worker.planned.pop(request_id)
        worker.queue.remove(request_id, now)
        self._count_priority(gone.priority, -1)
        worker.planned_tokens -= gone.n_computed
        # One that decode refused, or that was cancelled in the queue, has kept no worker busy.
        if gone.started_s < inf and (was_first or worker.last_answer_s == now):
            for busy in (worker_id, *gone.others):
                if busy in self._workers:
                    self._workers[busy].last_computed_s = now
        for other in gone.others:
            self.release(other, request_id, now)
        if gone.source is not None:
            self.transfers[gone.source] -= 1
            if not self.transfers[gone.source]:
                del self.transfers[gone.source]

    def _queue(self, worker_id: WorkerId, request_id: RequestId, one: _Planned, now: float) -> None:
        worker = self._workers[worker_id]
        worker.queue.add(request_id, one.predicted_s, one.priority, now)
        self._count_priority(one.priority, 1)
        worker.planned[request_id] = one
        worker.planned_tokens += one.n_computed
        self._orders.note(worker_id)

    def _count_priority(self, priority: int, change: int) -> None:
        self._n_of_priority[priority] += change
        n = self._n_of_priority[priority]
        if n == change == 1:
            insort(self._priorities, priority)
        elif not n:
            del self._n_of_priority[priority]
            del self._priorities[bisect_left(self._priorities, priority)]

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
                self._orders.note(worker_id)

    def check(self) -> None:
        """Check that queued time and transfers are those of the queues."""
        transfers: dict[WorkerId, int] = {}
        priorities: Counter[int] = Counter()
        for worker in self._workers.values():
            planned = list(worker.planned.values())
            assert worker.planned_tokens == sum(one.n_computed for one in planned)
            worker.queue.check()
            priorities.update(one.priority for one in planned)
            for one in planned:
                if one.source is not None:
                    transfers[one.source] = transfers.get(one.source, 0) + 1
        assert transfers == self.transfers
        assert priorities == self._n_of_priority
        assert sorted(priorities) == self._priorities
        self._orders.check(self._workers)

    def _state(
        self, worker_id: WorkerId, priority: int | None, now: float
    ) -> PrefillQueueState | None:
        """Return a queue as a request of a priority sees it; None: no whole prompt is taken."""
        worker = self._workers[worker_id]
        if not _takes_whole_prompts(worker.info):
            return None
        head_ends_s = worker.queue.head_ends_s(priority)
        return PrefillQueueState(
            worker.queue.behind_s(priority),
            head_ends_s if head_ends_s > now else -inf,
            worker.foreign_tokens,
            self._foreign_s(worker) if worker.foreign_tokens else 0.0,
            self._costs.scale(worker_id),
            worker.cost,
        )

    def _foreign_s(self, worker: _Prefill) -> float:
        """Return the predicted seconds of other conductors' tokens."""
        per_token = PrefillCost(0.0, worker.cost.c1_s, 0.0)
        return self._costs.prefill_s(worker.info.worker_id, per_token, worker.foreign_tokens, 0)

    def _queue_s(self, worker: _Prefill, now: float, priority: int | None = None) -> float:
        """Return the predicted seconds of the requests before a new one, less those that have run.

        `priority` is the new request's; None: all are before it.
        """
        queue = worker.queue
        queue_s = queue.behind_s(priority) + max(0.0, queue.head_ends_s(priority) - now)
        if worker.foreign_tokens:
            queue_s += self._foreign_s(worker)
        return queue_s


def _takes_whole_prompts(info: WorkerInfo) -> bool:
    return not info.draining and not info.stage_layers_only
