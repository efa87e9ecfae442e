"""Track the reservations and the load of each decode worker.

Loads are reports of a moment ago; reservations made since are added to them. Two sets of numbers
are kept for each worker: its reservations, for placement, and its running requests, for the
forecasts of admission. An order of all workers is kept up to date with what has changed, whenever
placement asks for it.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import DecodeCost, DecodeLoad, PrefillCost, WorkerInfo
from halfmoon_scheduling.cluster.decode_order import DecodeOrder
from halfmoon_scheduling.placement.estimates import DecodeCandidate
from halfmoon_scheduling.placement.local_prefill import LocalPrefillCandidate
from halfmoon_scheduling.prediction.cost_model import CostModel, unscaled_step_s
from halfmoon_scheduling.prediction.decode_forecast import (
    DecodeStarts,
    DecodeStay,
    uniform_load_change,
)
from halfmoon_scheduling.prediction.mean_decode_step import MeanDecodeStep
from halfmoon_scheduling.prediction.sliding_quantile import WINDOW, SlidingQuantile

HeldState = Literal["asked", "landing", "running"]


@dataclass(slots=True)
class _Held:
    """A request's claim on a decode worker."""

    n_pages: int
    #: Pages that had to be free for it, with one to grow into.
    n_wanted: int
    stay: DecodeStay
    #: Its TBT limit, seconds.
    tbt_slo_s: float = inf
    #: Predicted seconds in which it is prefilled there; 0 if it is not, or that is done.
    local_s: float = 0.0
    #: "asked": not in any load yet. "landing": loads count it as reserved. "running".
    state: HeldState = "asked"


@dataclass(slots=True)
class _Sums:
    """Sums over the claims of one state on a worker."""

    n: int = 0
    pages: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Decode:
    info: WorkerInfo
    cost: DecodeCost
    #: Our requests there.
    held: dict[RequestId, _Held] = field(default_factory=dict)
    #: Sums of `held`, so that a load report visits none of them.
    asked: _Sums = field(default_factory=_Sums)
    landing: _Sums = field(default_factory=_Sums)
    running: _Sums = field(default_factory=_Sums)
    #: The last load with the claims since; estimates, never exact.
    free_pages: int = 0
    n_requests: int = 0
    context_tokens: int = 0
    #: The part of `n_requests` and `context_tokens` that is running.
    n_running: int = 0
    running_tokens: int = 0
    #: Free pages and requests of its last report; None before the first one.
    reported: tuple[int, int] | None = None
    #: This worker as a candidate of placement; None when an input has changed.
    candidate: DecodeCandidate | None = None
    #: This worker as a candidate for local prefill; likewise.
    terms: LocalPrefillCandidate | None = None

    def count(self, held: _Held, sign: int) -> None:
        """Add a claim to the sums of its state, or take it out."""
        sums: _Sums = getattr(self, held.state)
        sums.n += sign
        sums.pages += sign * held.n_pages
        sums.tokens += sign * held.stay.n_tokens

    def move(self, held: _Held, state: HeldState) -> None:
        """Change the state of a claim."""
        self.count(held, -1)
        held.state = state
        self.count(held, 1)


@dataclass(slots=True)
class _Full:
    """A worker's refusal of a reservation that it seemed to have room for."""

    #: When it may be asked for any number of pages again.
    until_s: float
    #: Pages that it was asked for.
    n_pages: int
    #: Whether it has reported since: then it may be asked for fewer pages.
    reported: bool = False


class DecodePool:
    """Track live decode workers, our claims on them, and their future load."""

    def __init__(
        self,
        costs: CostModel,
        *,
        decode_time_s: float | None = None,
        counts_running: bool = False,
    ) -> None:
        """Start without workers.

        Args:
            costs: predictions, which learn from loads.
            decode_time_s: seconds that every request decodes, for the uniform forecast. None: the
                mean of recently finished requests, and infinite until there is one.
            counts_running: whether that mean counts running requests while few have finished.
        """
        self._counts_running = counts_running
        self._costs = costs
        self._given_decode_time_s = decode_time_s
        self._seen_decode_times_s = SlidingQuantile()
        self._workers: dict[WorkerId, _Decode] = {}
        #: Exactly the claims in state "running", by their start; the others are in `_pending`.
        self._running = DecodeStarts()
        self._pending = DecodeStarts()
        #: Sum of the starts in `_running`, except for rounding; exactly 0 without any.
        self._sum_of_starts_s = 0.0
        #: Mean step over all workers, by their running requests.
        self._mean = MeanDecodeStep(costs)
        #: Workers that may have more room since the last `take_workers_with_more_room`.
        self._roomier: set[WorkerId] = set()
        #: Workers that refused a reservation, until the first tick after `until_s` or a report of
        #: more room.
        self._full: dict[WorkerId, _Full] = {}
        #: The workers that take new work, as they were but for those in `_changed`.
        self._order = DecodeOrder()
        self._changed: set[WorkerId] = set()
        #: Workers with requests.
        self._n_busy = 0

    # -- live workers ------------------------------------------------------------------------

    def __contains__(self, worker_id: WorkerId) -> bool:
        return worker_id in self._workers

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._workers)

    def join(self, info: WorkerInfo) -> None:
        """Add a worker, or update its record; claims on it stay."""
        cost = info.decode_cost or DecodeCost()
        if (worker := self._workers.get(info.worker_id)) is None:
            self._workers[info.worker_id] = _Decode(info, cost, free_pages=info.n_blocks)
            self._roomier.add(info.worker_id)
        else:
            worker.info, worker.cost = info, cost
        self._invalidate(self._workers[info.worker_id])
        self._update_mean_step(self._workers[info.worker_id])

    def leave(self, worker_id: WorkerId) -> None:
        """Remove a worker that is gone, with all claims on it."""
        for request_id in list(self._workers[worker_id].held):
            self.release(worker_id, request_id)
        self._set_requests(self._workers[worker_id], 0)
        del self._workers[worker_id]
        self._order.discard(worker_id)
        self._changed.discard(worker_id)
        self._mean.drop(worker_id)
        self._roomier.discard(worker_id)
        self._full.pop(worker_id, None)

    def candidates(self, workers: Iterable[WorkerInfo], n_pages: int) -> list[DecodeCandidate]:
        """Return the candidates of these workers, without those that refused as many pages."""
        if self._full:
            workers = [info for info in workers if self._may_ask(info.worker_id, n_pages)]
        return [
            (decode := self._workers[info.worker_id]).candidate or self._renew(decode)
            for info in workers
        ]

    def choose(
        self,
        n_pages: int,
        n_tokens: int,
        not_to_ask: Collection[WorkerId],
        pages_at: WorkerId | None = None,
    ) -> tuple[WorkerId | None, float]:
        """Return what `choose_decode` chooses among all workers that take work.

        Args:
            n_pages: pages that must be free.
            n_tokens: tokens of the request's context.
            not_to_ask: workers that are left out.
            pages_at: the worker that may have pages of the prompt's prefix.
        """
        for worker_id in self._changed:
            worker = self._workers[worker_id]
            if worker.info.draining:
                self._order.discard(worker_id)
            else:
                self._order.put(worker.candidate or self._renew(worker))
        self._changed.clear()
        return self._order.choose(
            n_pages,
            n_tokens,
            lambda worker_id: worker_id not in not_to_ask and self._may_ask(worker_id, n_pages),
            pages_at,
        )

    def local_prefill_candidates(
        self, candidates: Iterable[DecodeCandidate]
    ) -> list[tuple[DecodeCandidate, LocalPrefillCandidate]]:
        """Return the candidates that prefill by themselves, each with the terms of that."""
        made = []
        for candidate in candidates:
            worker = self._workers[candidate.worker_id]
            if worker.info.local_prefill_tokens:
                if worker.terms is None:
                    worker.terms = self._terms(worker)
                made.append((candidate, worker.terms))
        return made

    # -- claims ------------------------------------------------------------------------------

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
        """Claim pages for a request that will decode at a worker from about `stay.start_s`.

        Args:
            worker_id: a live worker.
            request_id: a request without a claim there.
            n_pages: pages of its prompt.
            stay: its start, and its tokens of context.
            n_wanted: pages that must be free for it; None: those of its prompt.
            tbt_slo_s: its TBT limit, seconds; None: no limit.
            local_s: seconds in which it is prefilled there; 0: it is not.
        """
        worker = self._workers[worker_id]
        worker.held[request_id] = held = _Held(
            n_pages, n_wanted or n_pages, stay, inf if tbt_slo_s is None else tbt_slo_s, local_s
        )
        worker.count(held, 1)
        worker.free_pages -= n_pages
        self._set_requests(worker, worker.n_requests + 1)
        worker.context_tokens += stay.n_tokens
        self._invalidate(worker)
        self._pending.add(request_id, stay.start_s, stay.n_tokens)

    def on_landing_reserved(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """Record that a request's pages are reserved: loads count them from now on."""
        worker = self._workers[worker_id]
        worker.move(worker.held[request_id], "landing")

    def start(self, worker_id: WorkerId, request_id: RequestId, now: float) -> None:
        """Record that a request's prefill is done, and that it runs from now on."""
        worker = self._workers[worker_id]
        held = worker.held[request_id]
        stay = held.stay
        assert not stay.running, "a request starts once"
        self._pending.remove(request_id, stay.start_s)
        self._running.add(request_id, now, stay.n_tokens)
        self._sum_of_starts_s += now
        worker.move(held, "running")
        stay.running, stay.start_s = True, now
        if held.local_s:
            held.local_s, worker.terms = 0.0, None
        worker.n_running += 1
        worker.running_tokens += stay.n_tokens
        self._update_mean_step(worker)

    def release(self, worker_id: WorkerId, request_id: RequestId) -> None:
        """End a request's claim on a worker, if it has one."""
        worker = self._workers.get(worker_id)
        if worker is None or (held := worker.held.pop(request_id, None)) is None:
            return
        worker.count(held, -1)
        stay = held.stay
        worker.free_pages = min(worker.info.n_blocks, worker.free_pages + held.n_pages)
        self._set_requests(worker, max(0, worker.n_requests - 1))
        worker.context_tokens = max(0, worker.context_tokens - stay.n_tokens)
        self._invalidate(worker)
        if stay.running:
            worker.n_running = max(0, worker.n_running - 1)
            worker.running_tokens = max(0, worker.running_tokens - stay.n_tokens)
            self._update_mean_step(worker)
        (self._running if stay.running else self._pending).remove(request_id, stay.start_s)
        if stay.running:
            self._sum_of_starts_s -= stay.start_s
            if not len(self._running):
                self._sum_of_starts_s = 0.0  # exactly: sums of fractions drift
        if held.state != "asked":
            self._full.pop(worker_id, None)
        self._roomier.add(worker_id)

    def on_refused(self, worker_id: WorkerId, request_id: RequestId, until_s: float) -> None:
        """Record that a worker has no room for a request, whose claim is in state "asked".

        It is asked for no pages until it reports, and then for fewer pages. This ends at
        `until_s`, or with a report of more room.
        """
        self._full[worker_id] = _Full(until_s, self._workers[worker_id].held[request_id].n_wanted)

    def on_tick(self, now: float) -> None:
        """Let workers whose refusal is over be asked again."""
        for worker_id in [w for w, full in self._full.items() if full.until_s <= now]:
            del self._full[worker_id]
            self._roomier.add(worker_id)

    # -- room for waiting requests -----------------------------------------------------------

    def take_workers_with_more_room(self) -> set[WorkerId]:
        """Return the workers that may have more room than at the last call; no others have."""
        roomier, self._roomier = self._roomier, set()
        return roomier

    def has_room(self, worker_id: WorkerId, n_pages: int) -> bool:
        """Return whether a live worker would be asked for so many pages."""
        has_pages = self._workers[worker_id].free_pages >= n_pages
        return has_pages and self._may_ask(worker_id, n_pages)

    def _may_ask(self, worker_id: WorkerId, n_pages: int) -> bool:
        full = self._full.get(worker_id)
        return full is None or (full.reported and n_pages < full.n_pages)

    def decoded_for(self, worker_id: WorkerId, request_id: RequestId, now: float) -> float:
        """Return the seconds for which a running request has been decoding at a worker."""
        return now - self._workers[worker_id].held[request_id].stay.start_s

    def requests(self, worker_id: WorkerId) -> set[RequestId]:
        """Return our requests at a live worker."""
        return set(self._workers[worker_id].held)

    def n_running_at(self, worker_id: WorkerId) -> int:
        """Return how many of our requests decode at a worker; 0 if it is not there."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.running.n

    @property
    def n_running(self) -> int:
        """Our requests that decode, at all workers."""
        return len(self._running)

    # -- reports -----------------------------------------------------------------------------

    def on_load(self, worker_id: WorkerId, load: DecodeLoad) -> None:
        """Take over a worker's load, plus the claims that it can't know of yet."""
        if (worker := self._workers.get(worker_id)) is None:
            return
        asked, ours = worker.asked, worker.running
        n_free_before = worker.free_pages
        worker.free_pages = load.free_pages - asked.pages
        self._set_requests(worker, load.n_running + load.n_reserved + asked.n)
        worker.context_tokens = load.context_tokens + asked.tokens + worker.landing.tokens
        # The report may lack requests that were started a moment ago.
        worker.n_running = max(load.n_running, ours.n)
        worker.running_tokens = max(load.context_tokens, ours.tokens)
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
        self._invalidate(worker)
        if load.n_running:
            self._costs.observe_step(
                worker_id, worker.cost, load.n_running, load.context_tokens, load.step_s
            )
        self._update_mean_step(worker)

    def observe_decode_time(self, seconds: float) -> None:
        """Learn the seconds that a finished request has decoded for."""
        self._seen_decode_times_s.observe(seconds)

    def decode_time_s(self, now: float) -> float:
        """Return the seconds that every request decodes (t_d) in the uniform forecast.

        Short answers are over first. So with `counts_running`, and as long as few have been seen,
        the seconds of those that still run count too: all seconds over all ends are the mean.
        """
        if self._given_decode_time_s is not None:
            return self._given_decode_time_s
        seen = self._seen_decode_times_s
        if not len(seen):
            return inf
        if not self._counts_running:
            return seen.mean
        running_s = max(0.0, len(self._running) * now - self._sum_of_starts_s)
        return seen.mean + (1 - len(seen) / WINDOW) * running_s / len(seen)

    # -- predictions for admission: see `DecodeLoadPredictor` --------------------------------

    def running_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Return the seconds per step of a worker's running requests and one of `n_tokens`."""
        return self._step_s(decode, 1, n_tokens)

    def mean_tbt_s(self, n_tokens: int) -> float:
        """Return the mean seconds per step over all workers now, with a request of `n_tokens`."""
        return self._mean.mean_s(1, n_tokens)

    def uniform_tbt_s(self, n_tokens: int, at_s: float, now: float) -> float:
        """Return the mean seconds per step over all workers later, by the uniform forecast."""
        change = uniform_load_change(
            self._running, self._pending, now, at_s, self.decode_time_s(now)
        )
        return self._mean.mean_s(change.n_requests + 1, change.context_tokens + n_tokens)

    def unloaded_tbt_s(self, decode: WorkerId, n_tokens: int) -> float:
        """Return the seconds per step of a request that is alone at a worker."""
        return self._costs.step_s(decode, self._workers[decode].cost, 1, n_tokens)

    def profile_tbt_s(self, decode: WorkerId | None, n_tokens: int) -> float | None:
        """Return the seconds per step of a lone request by the profile alone.

        None: there is no such worker, or a request is at one of the pool.
        """
        worker = None if decode is None else self._workers.get(decode)
        if worker is None or self._n_busy:
            return None
        return unscaled_step_s(worker.cost, 1, n_tokens)

    def is_idle(self, decode: WorkerId) -> bool:
        """Return whether nothing runs at a live worker."""
        return not self._workers[decode].n_running

    def loads_s(self) -> dict[WorkerId, float]:
        """Return the seconds per step of each worker's running requests; 0 without any."""
        return {
            worker_id: self._step_s(worker_id, 0, 0) if worker.n_running else 0.0
            for worker_id, worker in self._workers.items()
        }

    def used_shares(self) -> dict[WorkerId, float]:
        """Return the share of each worker's pages that are reserved or used."""
        return {
            worker_id: 1 - max(0, worker.free_pages) / max(1, worker.info.n_blocks)
            for worker_id, worker in self._workers.items()
        }

    def _update_mean_step(self, worker: _Decode) -> None:
        """Update the mean step after a worker's load or correction has changed."""
        worker_id = worker.info.worker_id
        self._mean.put(worker_id, worker.cost, worker.n_running, worker.running_tokens)

    def _set_requests(self, worker: _Decode, n_requests: int) -> None:
        self._n_busy += bool(n_requests) - bool(worker.n_requests)
        worker.n_requests = n_requests

    def _invalidate(self, worker: _Decode) -> None:
        """Note that inputs of a worker's candidates have changed."""
        worker.candidate = worker.terms = None
        self._changed.add(worker.info.worker_id)

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
            worker.info.local_prefill_step_s,
            worker.info.local_prefill_tbt_s,
        )

    def _step_s(self, worker_id: WorkerId, n_more: float, tokens_more: float) -> float:
        worker = self._workers[worker_id]
        n_requests = max(0.0, worker.n_running + n_more)
        tokens = max(0.0, worker.running_tokens + tokens_more)
        return self._costs.step_s(worker_id, worker.cost, n_requests, tokens)

    def check(self) -> None:
        """Check that starts are those of the claims, and that no candidate is out of date."""
        self._running.check()
        self._pending.check()
        self._mean.check()
        held = [held for worker in self._workers.values() for held in worker.held.values()]
        starts_s = [one.stay.start_s for one in held if one.stay.running]
        assert len(self._running) == len(starts_s)
        error_s = abs(self._sum_of_starts_s - sum(starts_s))
        assert error_s <= 1e-6 * max(1.0, sum(starts_s))
        assert len(self._pending) == sum(1 for one in held if not one.stay.running)
        for worker in self._workers.values():
            assert worker.candidate in (None, self._candidate(worker))
            assert worker.terms in (None, self._terms(worker))
            for state in ("asked", "landing", "running"):
                of_state = [one for one in worker.held.values() if one.state == state]
                pages = sum(one.n_pages for one in of_state)
                tokens = sum(one.stay.n_tokens for one in of_state)
                assert getattr(worker, state) == _Sums(len(of_state), pages, tokens)
            for one in worker.held.values():
                assert one.stay.running == (one.state == "running")
        assert self._roomier <= self._workers.keys() >= self._full.keys()
        assert self._n_busy == sum(1 for w in self._workers.values() if w.n_requests)
        settled = {
            worker_id: self._candidate(worker)
            for worker_id, worker in self._workers.items()
            if worker_id not in self._changed and not worker.info.draining
        }
        self._order.check(settled, besides=self._changed)


def _is_roomier(reported: tuple[int, int], than: tuple[int, int] | None) -> bool:
    """Return whether a report has more free pages or fewer requests than the one before."""
    return than is None or reported[0] > than[0] or reported[1] < than[1]
