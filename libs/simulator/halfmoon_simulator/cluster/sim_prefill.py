"""A prefill worker of the simulated world: the live one's queue and pages, a modelled engine.

    StartPrefill ─▶ pages, in turn ─▶ lease, fetch, make room ─▶ queue ─▶ passes ─▶ PrefillDone
                                          fetch ····················│· must be over
                                          landing and put ··········╰▶ start with the first pass

Pass by pass as `PrefillQueue` cuts them. A pass ends when its arithmetic and the fetches of
its requests are over (layer-wise loading: the longer of both). The landing's bytes are on the
wire from the first pass on; `PrefillDone` is said when both they and the passes are over.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from halfmoon_protocol.ids import RequestId, Ticket, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    Cancel,
    ChangeRole,
    Hello,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
    ToConductor,
    ToPrefill,
    Unwelcome,
)
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk, PrefillQueue, QueueFull
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer
from halfmoon_simulator.cluster.pipeline_worker import PipelineWorker
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.costs.cost_file import CostFile

#: Any token that ends nothing.
FIRST_TOKEN_ID = 0
#: The engine's model says this when a request's answer is as long as its trace says.
STOP_TOKEN_ID = 1


@dataclass(eq=False, slots=True)
class _Job:
    """One request here."""

    start: StartPrefill
    n_tokens: int
    arrived_s: float
    predicted_s: float
    #: Its place among all that this worker was given.
    number: int
    pages: list[int] = field(default_factory=list)
    #: Where the cached prefix comes from, as long as it is leased.
    source: SimKvstore | None = None
    #: Where new blocks go, as long as room is reserved, and how many.
    home: SimKvstore | None = None
    n_put: int = 0
    n_cached: int = 0
    fetch: SimTransfer | None = None
    landing: SimTransfer | None = None
    put: SimTransfer | None = None
    fetch_s: float = 0.0
    computing_since_s: float = -1.0
    compute_s: float = 0.0
    computed_s: float = -1.0
    #: PrefillDone is said; only the put may still be under way.
    answered: bool = False
    cancelled: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.start.request_id

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.start.request_id)


class SimPrefill:
    """One prefill worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        spec: ClusterSpec,
        costs: CostFile,
        agenda: EventQueue,
        wires: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        host_of: Callable[[str], str],
        peers: "Callable[[WorkerId], SimPrefill | None]",
        n_output: Callable[[RequestId], int],
        answer: Callable[[WorkerId, ToConductor], None],
    ) -> None:
        """An idle worker.

        Args:
            worker_id: its name.
            host: where it runs; its home kvstore, if any, is on the same.
            spec: sizes.
            costs: times.
            agenda: the clock.
            wires: moves bytes.
            kvstores: a live kvstore by name.
            host_of: the host of a worker.
            peers: a live prefill worker by name.
            n_output: tokens that this try of a request will get in all.
            answer: says something to the conductor.
        """
        self.worker_id = worker_id
        self.host = host
        self.dead = False
        self.layout: KvLayout = costs.layout(spec.block_tokens)
        self.pages = PageAllocator(spec.pages(costs))
        self.queue = PrefillQueue(chunk_tokens=spec.chunk_tokens, max_requests=spec.max_requests)
        self._costs = costs
        self._agenda = agenda
        self._wires = wires
        self._kvstores = kvstores
        self._host_of = host_of
        self._n_output = n_output
        self._answer = answer
        self._jobs: dict[RequestId, _Job] = {}
        #: Jobs without pages; they take them in the queue's order.
        self._waiting: dict[RequestId, _Job] = {}
        self._n_given = 0
        #: Its parts of prompts that a group computes.
        self.staging = PipelineWorker(
            self, spec, costs, agenda, wires, kvstores, host_of, peers, n_output
        )
        #: What the pass under way computes; a request that fails in it is taken out.
        self._pass: list[PrefillChunk] = []
        self._passing = False
        self._pass_began_s = 0.0
        self._pass_computed = False
        #: Predicted seconds of all requests whose passes are not over.
        self._backlog_s = 0.0
        #: Seconds in passes so far, and tokens computed and fetched.
        self.busy_s = 0.0
        self.computed_tokens = 0
        self.cached_tokens = 0

    # -- what the world asks -----------------------------------------------------------------

    @property
    def backlog_s(self) -> float:
        """Predicted seconds until all that is here has its first token."""
        running_s = self._agenda.now - self._pass_began_s if self._passing else 0.0
        return max(0.0, self._backlog_s + self.staging.backlog_s - running_s)

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return not self._jobs

    def load(self) -> PrefillLoad:
        """What it reports."""
        return PrefillLoad(
            n_queued=len(self.queue) + len(self.staging),
            queued_tokens=self.queue.queued_tokens + self.staging.queued_tokens,
            free_pages=self.pages.n_free,
            n_pages=self.pages.n_pages,
        )

    def receive(self, message: ToPrefill) -> None:
        """A conductor's message."""
        match message:
            case StartPrefill() if message.stages:
                self.staging.begin(message)
            case StartPrefill():
                self._on_start(message)
            case Cancel(request_id=request_id) if request_id in self.staging:
                self.staging.cancel(request_id)
            case Cancel(request_id=request_id):
                self._on_cancel(request_id)
            case Hello() | Unwelcome() | ChangeRole():
                raise AssertionError(f"{self.worker_id} got {message!r}")
            case _:
                assert_never(message)

    def source_lost(self, kvstore: SimKvstore) -> None:
        """A kvstore is gone: who reads from it fails, who writes to it does without."""
        self.staging.kvstore_lost(kvstore)
        for job in list(self._jobs.values()):
            if job.request_id not in self._jobs:
                continue  # its pass waited for one that failed here, and is over
            if job.home is kvstore:
                job.home = None
                if job.put is not None:
                    self._wires.cancel(job.put)
                    job.put = None
            if job.source is kvstore and job.fetch is not None and not job.fetch.over:
                job.source = None
                self._fail(job, f"{kvstore.worker_id} is lost", culprit=kvstore.worker_id)
            if job.answered:
                self._finish_keeping(job)

    def crash(self) -> None:
        """The process is gone, and with it all that it held elsewhere."""
        self.dead = True
        for job in self._jobs.values():
            self._let_go(job)
        self._jobs.clear()
        self.staging.crash()

    def say(self, message: ToConductor) -> None:
        """Tell the conductor something."""
        self._answer(self.worker_id, message)

    def pages_freed(self) -> None:
        """Who waits for pages may get some."""
        self.staging.take_pages()
        self._take_pages()

    def next_number(self) -> int:
        """The place of something that this worker is given."""
        self._n_given += 1
        return self._n_given

    # -- a request's way ---------------------------------------------------------------------

    def _on_start(self, start: StartPrefill) -> None:
        n_tokens = len(start.token_ids)
        hoped = start.cached.n_blocks * self.layout.block_size if start.cached else 0
        n_cached = min(hoped, self._most_cached(n_tokens))
        predicted_s = self._costs.prefill_s(n_tokens, n_cached)
        job = _Job(start, n_tokens, self._agenda.now, predicted_s, self.next_number())
        reason = ""
        if self.layout.blocks_for(n_tokens) > self.pages.n_pages:
            reason = f"{n_tokens} tokens do not fit the pool of {self.pages.n_pages} pages"
        else:
            try:
                self.queue.push(
                    job.request_id,
                    n_tokens=n_tokens,
                    n_cached=n_cached,
                    ready=False,
                    priority=start.priority,
                )
            except QueueFull as error:
                reason = str(error)
        if reason:
            failed = PrefillFailed(request_id=job.request_id, reason=reason, retryable=True)
            self.say(failed)
            return
        self._jobs[job.request_id] = job
        self._backlog_s += predicted_s
        self._waiting[job.request_id] = job
        self._take_pages()

    def _most_cached(self, n_tokens: int) -> int:
        return (n_tokens - 1) // self.layout.block_size * self.layout.block_size

    def _take_pages(self) -> None:
        while self._waiting:
            first = next(one for one in self.queue.in_order() if one in self._waiting)
            needed = self.layout.blocks_for(self._waiting[first].n_tokens)
            if needed > self.pages.n_free:
                return
            job = self._waiting.pop(first)
            job.pages = self.pages.allocate(needed)
            self._fetch(job)
            self._make_room(job)
            self.queue.rebase(job.request_id, job.n_cached)
            self.queue.ready(job.request_id)
            self.next_pass()

    def _fetch(self, job: _Job) -> None:
        cached = job.start.cached
        if cached is None:
            return
        kvstore = self._kvstores(cached.kvstore.worker_id)
        if kvstore is None:
            return
        size = self.layout.block_size
        n_blocks = min(cached.n_blocks, self._most_cached(job.n_tokens) // size)
        hashes = job.start.block_hashes[:n_blocks]
        n_found = kvstore.lease(self.worker_id, job.ticket, hashes) if hashes else 0
        if not n_found:
            return
        job.source = kvstore
        job.n_cached = n_found * size
        began_s = self._agenda.now

        def fetched() -> None:
            job.fetch_s = self._agenda.now - began_s
            self._end_pass()

        job.fetch = self._wires.start(
            kvstore.host, self.host, n_found * self.layout.block_bytes, fetched
        )

    def _make_room(self, job: _Job) -> None:
        start = job.start
        if start.store_in is None or not start.block_hashes:
            return
        home = self._kvstores(start.store_in.worker_id)
        is_source = start.cached is not None and start.cached.kvstore == start.store_in
        first = job.n_cached // self.layout.block_size if is_source else 0
        hashes = start.block_hashes[first:]
        if home is None or not hashes:
            return
        parent = start.block_hashes[first - 1] if first else None
        # A ticket names a lease or a reservation; here a request may have both.
        n_put = home.reserve(self._put_owner, job.ticket, hashes, parent)
        if n_put is not None:
            job.home, job.n_put = home, n_put

    @property
    def _put_owner(self) -> str:
        return f"{self.worker_id} put"

    # -- passes ------------------------------------------------------------------------------

    def next_pass(self) -> None:
        """Begin another pass, if none is under way and there is something to compute."""
        if self._passing or self.dead:
            return
        batch = self.queue.next_batch()
        if self.staging.try_start_pass(self._jobs[batch[0].request_id].number if batch else None):
            return
        self._pass = batch
        if not self._pass:
            return
        self._passing = True
        now = self._agenda.now
        seconds = self._costs.pass_s
        for chunk in self._pass:
            job = self._jobs[chunk.request_id]
            first = job.computing_since_s < 0
            seconds += self._costs.chunk_s(chunk.start, chunk.stop, first=first)
            if first:
                job.computing_since_s = now
                self._start_writing(job)
        self._pass_began_s = now
        self._pass_computed = False
        self._agenda.after(seconds, self._on_pass_computed)

    def staged_pass(self) -> None:
        """A pass of a staged prompt begins: none other does until `staged_pass_over`."""
        self._passing, self._pass_computed = True, False
        self._pass_began_s = self._agenda.now

    def staged_pass_over(self) -> None:
        """That pass has ended."""
        self.busy_s += self._agenda.now - self._pass_began_s
        self._passing = False

    def _start_writing(self, job: _Job) -> None:
        decode = job.start.landing.region.segment
        n_bytes = self.layout.blocks_for(job.n_tokens) * self.layout.block_bytes
        job.landing = self._wires.start(
            self.host, self._host_of(decode), n_bytes, lambda: self._settle(job)
        )
        if job.home is not None and job.n_put:
            job.put = self._wires.start(
                self.host,
                job.home.host,
                job.n_put * self.layout.block_bytes,
                lambda: self._finish_keeping(job),
            )

    def _on_pass_computed(self) -> None:
        if not self.dead:
            self._pass_computed = True
            self._end_pass()

    def _end_pass(self) -> None:
        """End the pass under way if its arithmetic and its fetches are over."""
        if not self._passing or not self._pass_computed or self.dead:
            return
        jobs = [self._jobs[chunk.request_id] for chunk in self._pass]
        if any(job.fetch is not None and not job.fetch.over for job in jobs):
            return
        took = self._agenda.now - self._pass_began_s
        self.busy_s += took
        chunks, self._pass = self._pass, []
        self._passing = False
        self.queue.advance(chunks)
        for job in jobs:
            if job.cancelled:  # no pass that the first to let go of pages brings about has these
                self.queue.remove(job.request_id)
        for job, chunk in zip(jobs, chunks, strict=True):
            job.compute_s += took
            self.computed_tokens += chunk.n_tokens
            if chunk.last:
                job.computed_s = self._agenda.now
                self._backlog_s -= job.predicted_s
            if job.cancelled:
                self._stop(job)
            elif chunk.last:
                self._settle(job)
        self.next_pass()

    def _settle(self, job: _Job) -> None:
        """All computed and all landed: say so."""
        if job.answered or job.cancelled or job.computed_s < 0 or self.dead:
            return
        if job.landing is not None and not job.landing.over:
            return
        if job.source is not None:
            job.source.release(self.worker_id, job.ticket)
            job.source = None
        job.answered = True
        self.cached_tokens += job.n_cached
        ends = self._n_output(job.request_id) <= 1
        done = PrefillDone(
            request_id=job.request_id,
            first_token=STOP_TOKEN_ID if ends else FIRST_TOKEN_ID,
            finish="stop" if ends else "",
            n_cached=job.n_cached,
            queue_s=job.computing_since_s - job.arrived_s,
            compute_s=job.compute_s,
            drain_s=self._agenda.now - job.computed_s,
            fetched_bytes=job.n_cached * self.layout.token_bytes,
            fetch_s=job.fetch_s,
        )
        self._answer(self.worker_id, done)
        self._finish_keeping(job)

    def _finish_keeping(self, job: _Job) -> None:
        """Serve the new blocks once they are written, and give the pages back."""
        if not job.answered or self.dead or (job.put is not None and not job.put.over):
            return
        if job.home is not None:
            job.home.commit(self._put_owner, job.ticket, job.n_put)
            job.home = None
        self._remove(job)

    # -- other ends --------------------------------------------------------------------------

    def _on_cancel(self, request_id: RequestId) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            self._answer(self.worker_id, PrefillStopped(request_id=request_id))
            return
        job.cancelled = True
        if all(chunk.request_id != request_id for chunk in self._pass):
            self._stop(job)

    def _stop(self, job: _Job) -> None:
        """Nothing of this request is being computed: let go of it, and say so."""
        self._withdraw(job)
        self._answer(self.worker_id, PrefillStopped(request_id=job.request_id))

    def _fail(self, job: _Job, reason: str, *, culprit: WorkerId) -> None:
        """End a request in error; a pass that it is in goes on without it."""
        self._pass = [chunk for chunk in self._pass if chunk.request_id != job.request_id]
        self._withdraw(job)
        failed = PrefillFailed(
            request_id=job.request_id, reason=reason, retryable=True, culprit=culprit
        )
        self._answer(self.worker_id, failed)
        self._end_pass()

    def _withdraw(self, job: _Job) -> None:
        if job.computed_s < 0:
            self._backlog_s -= job.predicted_s
        self.queue.remove(job.request_id)
        self._let_go(job)
        self._remove(job)

    def _let_go(self, job: _Job) -> None:
        """Of all that it holds elsewhere."""
        for transfer in (job.fetch, job.landing, job.put):
            if transfer is not None:
                self._wires.cancel(transfer)
        if job.source is not None:
            job.source.release(self.worker_id, job.ticket)
            job.source = None
        if job.home is not None:
            job.home.revoke(self._put_owner, job.ticket)
            job.home = None

    def _remove(self, job: _Job) -> None:
        del self._jobs[job.request_id]
        self._waiting.pop(job.request_id, None)
        self.pages.release(job.pages)
        self.pages_freed()

    def check(self) -> None:
        """Audit: pages are held by requests alone, and everything queued is a request."""
        self.queue.check()
        self.pages.check()
        held = [page for job in self._jobs.values() for page in job.pages]
        held += self.staging.held_pages()
        assert len(set(held)) == len(held), "a page belongs to two requests"
        assert len(held) + self.pages.n_free == self.pages.n_pages
        assert len(self.queue) <= len(self._jobs)
        assert all(chunk.request_id in self._jobs for chunk in self._pass)
