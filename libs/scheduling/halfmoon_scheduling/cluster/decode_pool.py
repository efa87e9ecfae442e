"""The decode side of the cluster's books: what is held at each decode worker, and until when.

Loads are reports of a moment ago; what was promised since is added to them. Two sets of
numbers are kept for each worker: what has been promised to it, which placement looks at, and
what it runs now, from which the forecasts of admission set out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import DecodeCost, DecodeLoad, PrefillCost, WorkerInfo
from halfmoon_scheduling.placement.estimates import DecodeCandidate
from halfmoon_scheduling.placement.local_prefill import LocalPrefillCandidate
from halfmoon_scheduling.prediction.cost_model import CostModel
from halfmoon_scheduling.prediction.decode_forecast import (
    DecodeStarts,
    DecodeStay,
    uniform_load_change,
)
from halfmoon_scheduling.prediction.mean_decode_step import MeanDecodeStep
from halfmoon_scheduling.prediction.sliding_quantile import SlidingQuantile


@dataclass(slots=True)
class _Held:
    """A request's claim on a decode worker."""

    n_pages: int
    #: Pages that were to be free for it: with one to grow into.
    n_wanted: int
    stay: DecodeStay
    #: Its limit of the time between tokens, seconds.
    tbt_slo_s: float = inf
    #: Predicted seconds of the step in which it is prefilled there; 0 when it is not, or was.
    local_s: float = 0.0
    #: "asked": not in any load yet. "landing": counted as reserved. "running".
    state: str = "asked"


@dataclass(slots=True)
class _Decode:
    info: WorkerInfo
    cost: DecodeCost
    #: Our requests there.
    held: dict[RequestId, _Held] = field(default_factory=dict)
    #: The last load with what happened since; estimates, never exact.
    free_pages: int = 0
    n_requests: int = 0
    context_tokens: int = 0
    #: The part of `n_requests` and `context_tokens` that is running.
    n_running: int = 0
    running_tokens: int = 0
    #: Free pages and requests of its last report; None before the first one.
    reported: tuple[int, int] | None = None
    #: This worker as placement sees it; None when something has changed.
    candidate: DecodeCandidate | None = None
    #: The same for prefilling there.
    terms: LocalPrefillCandidate | None = None


@dataclass(slots=True)
class _Full:
    """A worker's refusal of a reservation that our books had room for."""

    #: When it may be asked for anything again.
    until_s: float
    #: What it was asked for.
    n_pages: int
    #: Whether it has reported since: then it may be asked for less.
    reported: bool = False


class DecodePool:
    """Live decode workers, our claims on them, and what they will be running."""

    def __init__(self, costs: CostModel, *, decode_time_s: float | None = None) -> None:
        """No workers yet.

        Args:
            costs: learns from loads.
            decode_time_s: how long every request decodes, for the uniform forecast; None: the
                mean of those that have ended lately, and for ever until one has.
        """
        self._costs = costs
        self._given_decode_time_s = decode_time_s
        self._seen_decode_times_s = SlidingQuantile()
        self._workers: dict[WorkerId, _Decode] = {}
        #: Exactly the claims in state "running", by their start; the others in `_pending`.
        self._running = DecodeStarts()
        self._pending = DecodeStarts()
        #: Over all workers, by what they run now.
        self._mean = MeanDecodeStep(costs)
        #: Workers that may have room for more since `take_workers_with_more_room` was asked last.
        self._roomier: set[WorkerId] = set()
        #: Workers that refused a reservation, to the clock's first look after `until_s` or to a
        #: report of more room.
        self._full: dict[WorkerId, _Full] = {}

    # -- who is here -------------------------------------------------------------------------

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._workers)

    def join(self, info: WorkerInfo) -> None:
        """A worker is there, or its record changed; its claims stay."""
        cost = info.decode_cost or DecodeCost()
        if (worker := self._workers.get(info.worker_id)) is None:
            self._workers[info.worker_id] = _Decode(info, cost, free_pages=info.n_blocks)
            self._roomier.add(info.worker_id)
        else:
            worker.info, worker.cost = info, cost
            worker.candidate = worker.terms = None
        self._runs(self._workers[info.worker_id])

    def leave(self, worker_id: WorkerId) -> None:
        """A worker is gone, and with it all claims on it."""
        for request_id in list(self._workers[worker_id].held):
            self.release(worker_id, request_id)
        del self._workers[worker_id]
        self._mean.drop(worker_id)
        self._roomier.discard(worker_id)
        self._full.pop(worker_id, None)

    def candidates(self, workers: Iterable[WorkerInfo], n_pages: int) -> list[DecodeCandidate]:
        """These workers as placement sees them; without those that refused as many pages."""
        if self._full:
            workers = [info for info in workers if self._may_ask(info.worker_id, n_pages)]
        return [
            (decode := self._workers[info.worker_id]).candidate or self._renew(decode)
            for info in workers
        ]

    def local_prefill_candidates(
        self, candidates: Iterable[DecodeCandidate]
    ) -> list[tuple[DecodeCandidate, LocalPrefillCandidate]]:
        """Those of them that prefill by themselves, and what that takes there."""
        made = []
        for candidate in candidates:
            worker = self._workers[candidate.worker_id]
            if worker.info.local_prefill_tokens:
                if worker.terms is None:
                    worker.terms = self._terms(worker)
                made.append((candidate, worker.terms))
        return made

    # -- what is promised --------------------------------------------------------------------

    def hold(
        self,
        worker_id: WorkerId,
        request_id: RequestId,
        n_pages: int,
        stay: DecodeStay,
        *,
        n_wanted: int | None = None,
        tbt_slo_s: float | None = None,
        local_s: float = 0.0,
    ) -> None:
        """A request is to decode there, from about `stay.start_s`.

        Args:
            worker_id: of a live worker.
            request_id: not held there yet.
            n_pages: pages of its prompt.
            stay: when, and how much context.
            n_wanted: pages that are to be free for it; None: those of its prompt.
            tbt_slo_s: its limit of the time between tokens; None: no limit.
            local_s: seconds of the step in which it is prefilled there; 0: it is not.
        """
        worker = self._workers[worker_id]
        worker.held[request_id] = _Held(
            n_pages, n_wanted or n_pages, stay, inf if tbt_slo_s is None else tbt_slo_s, local_s
        )
        worker.free_pages -= n_pages
        worker.n_requests += 1
        worker.context_tokens += stay.n_tokens
        worker.candidate = worker.terms = None
        self._pending.add(request_id, stay.start_s, stay.n_tokens)

    def on_landing_reserved(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Its pages are set aside: loads count it from now on."""
        self._workers[worker_id].held[request_id].state = "landing"

    def start(self, worker_id: WorkerId, request_id: RequestId, now: float) -> None:
        """Its prefill is done: it runs from now on."""
        worker = self._workers[worker_id]
        held = worker.held[request_id]
        stay = held.stay
        assert not stay.running, "a request starts once"
        self._pending.remove(request_id, stay.start_s)
        self._running.add(request_id, now, stay.n_tokens)
        held.state, stay.running, stay.start_s = "running", True, now
        if held.local_s:
            held.local_s, worker.terms = 0.0, None
        worker.n_running += 1
        worker.running_tokens += stay.n_tokens
        self._runs(worker)

    def release(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """A request holds nothing there any more; if it did."""
        worker = self._workers.get(worker_id)
        if worker is None or (held := worker.held.pop(request_id, None)) is None:
            return
        stay = held.stay
        worker.free_pages = min(worker.info.n_blocks, worker.free_pages + held.n_pages)
        worker.n_requests = max(0, worker.n_requests - 1)
        worker.context_tokens = max(0, worker.context_tokens - stay.n_tokens)
        worker.candidate = worker.terms = None
        if stay.running:
            worker.n_running = max(0, worker.n_running - 1)
            worker.running_tokens = max(0, worker.running_tokens - stay.n_tokens)
            self._runs(worker)
        (self._running if stay.running else self._pending).remove(request_id, stay.start_s)
        if held.state != "asked":
            self._full.pop(worker_id, None)
        self._roomier.add(worker_id)

    def on_refused(self, worker_id: WorkerId, request_id: RequestId, until_s: float) -> None:
        """A worker has no room for a request that is held there in state "asked": it is asked for
        nothing until it reports, and then for less, until that time or a report of more room."""
        self._full[worker_id] = _Full(until_s, self._workers[worker_id].held[request_id].n_wanted)

    def on_tick(self, now: float) -> None:
        """Workers that refused may be asked again when their time is over."""
        for worker_id in [w for w, full in self._full.items() if full.until_s <= now]:
            del self._full[worker_id]
            self._roomier.add(worker_id)

    # -- room for those who wait -------------------------------------------------------------

    def take_workers_with_more_room(self) -> set[WorkerId]:
        """Workers that may have room for more than when this was asked last; no others have."""
        roomier, self._roomier = self._roomier, set()
        return roomier

    def has_room(self, worker_id: WorkerId, n_pages: int) -> bool:
        """Whether a live worker would be asked for so many pages."""
        has_pages = self._workers[worker_id].free_pages >= n_pages
        return has_pages and self._may_ask(worker_id, n_pages)

    def _may_ask(self, worker_id: WorkerId, n_pages: int) -> bool:
        full = self._full.get(worker_id)
        return full is None or (full.reported and n_pages < full.n_pages)

    def decoded_for(self, worker_id: WorkerId, request_id: RequestId, now: float) -> float:
        """Seconds that a request has been running there; it does."""
        return now - self._workers[worker_id].held[request_id].stay.start_s

    def requests(self, worker_id: WorkerId) -> set[RequestId]:
        """Our requests at a live worker."""
        return set(self._workers[worker_id].held)

    # -- what they report --------------------------------------------------------------------

    def on_load(self, worker_id: WorkerId, load: DecodeLoad) -> None:
        """Start again from what it says, plus what it can't know of yet."""
        if (worker := self._workers.get(worker_id)) is None:
            return
        asked = [held for held in worker.held.values() if held.state == "asked"]
        coming = [held for held in worker.held.values() if held.state != "running"]
        ours = [held for held in worker.held.values() if held.state == "running"]
        n_free_before = worker.free_pages
        worker.free_pages = load.free_pages - sum(held.n_pages for held in asked)
        worker.n_requests = load.n_running + load.n_reserved + len(asked)
        worker.context_tokens = load.context_tokens + sum(held.stay.n_tokens for held in coming)
        # What was started a moment ago may not be in the report.
        worker.n_running = max(load.n_running, len(ours))
        worker.running_tokens = max(load.context_tokens, sum(h.stay.n_tokens for h in ours))
        reported = load.free_pages, load.n_running + load.n_reserved
        if _is_roomier(reported, than=worker.reported):
            self._full.pop(worker_id, None)
            self._roomier.add(worker_id)
        elif (full := self._full.get(worker_id)) is not None and not full.reported:
            full.reported = True
            self._roomier.add(worker_id)
        elif worker.free_pages > n_free_before:
            self._roomier.add(worker_id)
        worker.reported = reported
        worker.candidate = worker.terms = None
        if load.n_running:
            self._costs.observe_step(
                worker_id, worker.cost, load.n_running, load.context_tokens, load.step_s
            )
        self._runs(worker)

    def observe_decode_time(self, seconds: float) -> None:
        """A request has decoded to its end, which took so long."""
        self._seen_decode_times_s.observe(seconds)

    @property
    def decode_time_s(self) -> float:
        """t_d of the uniform forecast, seconds."""
        if self._given_decode_time_s is not None:
            return self._given_decode_time_s
        seen = self._seen_decode_times_s
        return seen.mean if len(seen) else float("inf")

    # -- what admission asks: see `admission.Outlook` ----------------------------------------

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Seconds per step of what runs at a worker now and a request of `n_tokens`."""
        return self._step_s(decode, 1, n_tokens)

    def mean_tbt_s(self, n_tokens: int) -> float:
        """Mean seconds per step over all workers now, and a request of `n_tokens`."""
        return self._mean.mean_s(1, n_tokens)

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        """Mean seconds per step over all workers at a later moment, by the uniform forecast."""
        change = uniform_load_change(self._running, self._pending, now, at_s, self.decode_time_s)
        return self._mean.mean_s(change.n_requests + 1, change.context_tokens + n_tokens)

    def unloaded_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Seconds per step of a request that is alone there."""
        return self._costs.step_s(decode, self._workers[decode].cost, 1, n_tokens)

    def loads_s(self) -> dict[WorkerId, float]:
        """Seconds per step of what runs at each worker now; 0 where nothing does."""
        return {
            worker_id: self._step_s(worker_id, 0, 0) if worker.n_running else 0.0
            for worker_id, worker in self._workers.items()
        }

    def used_shares(self) -> dict[WorkerId, float]:
        """Share of each worker's pages that are promised, by the last load and what came since."""
        return {
            worker_id: 1 - max(0, worker.free_pages) / max(1, worker.info.n_blocks)
            for worker_id, worker in self._workers.items()
        }

    def _runs(self, worker: _Decode) -> None:
        """What a worker runs, or how fast, has changed."""
        worker_id = worker.info.worker_id
        self._mean.put(worker_id, worker.cost, worker.n_running, worker.running_tokens)

    def _renew(self, worker: _Decode) -> DecodeCandidate:
        worker.candidate = self._candidate(worker)
        return worker.candidate

    def _candidate(self, worker: _Decode) -> DecodeCandidate:
        worker_id, n_requests, tokens = (
            worker.info.worker_id,
            worker.n_requests,
            worker.context_tokens,
        )
        return DecodeCandidate(
            worker_id,
            n_requests,
            worker.free_pages,
            self._costs.step_s(worker_id, worker.cost, n_requests + 1, tokens),
            self._costs.per_token_s(worker_id, worker.cost),
        )

    def _terms(self, worker: _Decode) -> LocalPrefillCandidate:
        worker_id, n_requests = worker.info.worker_id, worker.n_requests
        step_s = self._costs.step_s(worker_id, worker.cost, n_requests, worker.context_tokens)
        return LocalPrefillCandidate(
            worker_id,
            worker.info.prefill_cost or PrefillCost(),
            worker.info.local_prefill_tokens,
            step_s if n_requests else 0.0,
            sum(held.local_s for held in worker.held.values()),
            min((held.tbt_slo_s for held in worker.held.values()), default=inf),
        )

    def _step_s(self, worker_id: WorkerId, n_more: float, tokens_more: float) -> float:
        worker = self._workers[worker_id]
        n_requests = max(0.0, worker.n_running + n_more)
        tokens = max(0.0, worker.running_tokens + tokens_more)
        return self._costs.step_s(worker_id, worker.cost, n_requests, tokens)

    def check(self) -> None:
        """Audit: starts are those of the claims, and no candidate is out of date."""
        self._running.check()
        self._pending.check()
        self._mean.check()
        held = [held for worker in self._workers.values() for held in worker.held.values()]
        assert len(self._running) == sum(1 for one in held if one.stay.running)
        assert len(self._pending) == sum(1 for one in held if not one.stay.running)
        for worker in self._workers.values():
            assert worker.candidate in (None, self._candidate(worker))
            assert worker.terms in (None, self._terms(worker))
            for one in worker.held.values():
                assert one.stay.running == (one.state == "running")
        assert self._roomier <= self._workers.keys() >= self._full.keys()


def _is_roomier(reported: tuple[int, int], than: tuple[int, int] | None) -> bool:
    """Whether more pages are free, or fewer requests there, than by the report before."""
    return than is None or reported[0] > than[0] or reported[1] < than[1]
