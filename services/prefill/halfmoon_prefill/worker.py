"""The prefill worker at work: from `StartPrefill` to `PrefillDone`, one task per request.

Each request's task takes pages (`entry`), fetches cached blocks and makes room for new ones
(`caching`), has its chunks computed (`computing`), settles (all bytes acknowledged, fetched
blocks verified: `settling`), answers, and keeps the new blocks for reuse.

Whatever way a request ends, its task gives everything back in `_give_back`, and only once no
forward pass and no transfer touches its pages or its landing any more. That is what
`PrefillStopped` and `PrefillFailed` promise.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from halfmoon_prefill.cache.prefix_cache_client import PrefixCacheClient
from halfmoon_prefill.cache.prefix_fetch import cancel_and_wait
from halfmoon_prefill.cache.replica_selector import ReplicaSelector
from halfmoon_prefill.completion import await_completion
from halfmoon_prefill.forward_loop import ForwardLoop
from halfmoon_prefill.forward_pass import PrefillForward
from halfmoon_prefill.metrics import PrefillCounts, page_metrics
from halfmoon_prefill.prefill_job import PrefillJob, PrefillRefused
from halfmoon_prefill.queue_admission import QueueAdmission
from halfmoon_prefill.settings import PrefillSettings
from halfmoon_prefill.trace_spans import record_prefill_spans
from halfmoon_protocol.errors import MessageTooLarge
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    ChangeRole,
    Hello,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
    ToPrefill,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.observability.logs import bind_request
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.message_loop import drop_unexpected, serve_messages
from halfmoon_scheduling.decode.decode_batch import finish_reason
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import Memory

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.1


@dataclass
class PrefillWorker:
    """Serves one port with one engine over one pool."""

    port: Port
    forward: PrefillForward
    transfer: TransferEngine
    memory: Memory
    kvstores: KvstoreClients
    info: WorkerInfo
    settings: PrefillSettings
    clock: Clock
    pages: PageAllocator
    #: None: no traces.
    tracer: Tracer | None = None
    #: Of the forward passes.
    watch: ForwardWatchdog = field(default_factory=ForwardWatchdog)
    queue: PrefillQueue = field(init=False)
    computing: ForwardLoop = field(init=False)
    replicas: ReplicaSelector = field(init=False)
    caching: PrefixCacheClient = field(init=False)
    entry: QueueAdmission = field(init=False)
    conductors: ConductorConnections = field(init=False)
    jobs: dict[RequestId, PrefillJob] = field(default_factory=dict, init=False)
    #: What is being done for each of `jobs`; cancelled to stop it.
    _works: dict[RequestId, "asyncio.Task[Message | None]"] = field(
        default_factory=dict, init=False
    )
    _counts: PrefillCounts = field(default_factory=PrefillCounts, init=False)
    #: Set while no request is here.
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.queue = PrefillQueue(
            chunk_tokens=self.settings.chunk_tokens, max_requests=self.settings.max_requests
        )
        self.layout = self.forward.engine.layout
        self.entry = QueueAdmission(
            self.info.worker_id, self.forward.engine, self.queue, self.pages
        )
        self.computing = ForwardLoop(self.queue, self.forward, self.watch)
        self.replicas = ReplicaSelector(self.kvstores, self.layout, self.clock)
        self.caching = PrefixCacheClient(
            self.replicas,
            self.transfer,
            self.memory,
            self.layout,
            self.clock,
            patience_s=self.settings.kvstore_read_s,
        )
        self.conductors = ConductorConnections(self.port, self._let_go)
        self._idle.set()

    async def serve(self) -> None:
        """Answer commands and compute until cancelled.

        Raises:
            Unwanted: no conductor wants this worker.
        """
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self.computing.run()),
                tasks.create_task(self._keep_house()),
            ]
            try:
                await serve_messages(
                    self.port, lambda peer, message: self._handle(peer, message, tasks)
                )
            finally:
                # The works' endings give back what they hold while `computing` still runs.
                for work in self._works.values():
                    work.cancel()
                for task in others:
                    task.cancel()

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Say that nothing new is taken, and finish what is here, for so long at the most."""
        self.info = info
        await self.conductors.broadcast_info(info)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    # -- commands ----------------------------------------------------------------------------

    async def _handle(self, peer: PeerId, message: AnyMessage, tasks: asyncio.TaskGroup) -> None:
        if isinstance(message, ToPrefill):
            await self._on_message(peer, message, tasks)
        else:
            drop_unexpected(self.port, message)

    async def _on_message(self, peer: PeerId, message: ToPrefill, tasks: asyncio.TaskGroup) -> None:
        match message:
            case StartPrefill():
                if (refusal := self._refusal(peer, message)) is not None:
                    await self.conductors.answer(peer, refusal)
                else:
                    self._on_start(peer, message, tasks)
            case Cancel(request_id=request_id):
                await self._on_cancel(peer, request_id)
            case Hello(conductor_id=conductor):
                await self.conductors.on_hello(conductor, peer, self.info)
            case Unwelcome(reason=reason):
                self.conductors.on_unwelcome(peer, reason)
            case ChangeRole():
                drop_unexpected(self.port, message)  # this worker's record states no `roles`
            case _:
                assert_never(message)

    def _refusal(self, peer: PeerId, start: StartPrefill) -> PrefillFailed | None:
        """Why a start is not taken in at all; None when it is, or was already."""
        job = self.jobs.get(start.request_id)
        if job is not None and job.owner != peer:
            reason = f"another connection has a request {start.request_id!r} here"
        elif job is None and self.info.draining:
            reason = f"{self.info.worker_id} is stopping: use another one"
        else:
            return None
        return PrefillFailed(request_id=start.request_id, reason=reason, retryable=True)

    async def _on_cancel(self, peer: PeerId, request_id: RequestId) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            await self.conductors.answer(peer, PrefillStopped(request_id=request_id))
        elif job.owner == peer:
            self._works[request_id].cancel()  # `_run` answers once its pages are quiet
        else:
            record_drop("foreign", self.port.commands, f"Cancel of {request_id} by {peer.hex()}")

    def _on_start(self, peer: PeerId, start: StartPrefill, tasks: asyncio.TaskGroup) -> None:
        request_id = start.request_id
        if request_id in self.jobs:
            record_drop("duplicate", self.port.commands, f"StartPrefill of {request_id}")
            return
        now = self.clock.now()
        job = PrefillJob(start, peer, now, now + start.landing_expires_s)
        self.jobs[request_id] = job
        self._idle.clear()
        self.conductors.owners.add(request_id, peer)
        with bind_request(request_id):  # also on the lines of libraries that it calls
            work = tasks.create_task(self._work(job), name=f"prefill {request_id}")
            self._works[request_id] = work
            tasks.create_task(self._run(job, work), name=f"ending of prefill {request_id}")

    def _let_go(self, request_id: RequestId) -> None:
        """Its owner is gone; `_run` sees to the rest."""
        self._works[request_id].cancel()

    # -- one request -------------------------------------------------------------------------

    async def _run(self, job: PrefillJob, work: "asyncio.Task[Message | None]") -> None:
        """See a request to its end, give back what it held, and only then say so.

        `work` may be cancelled at any moment, also before its first step and more than once;
        this task is not, as long as the worker serves.
        """
        async with self.caching.holding(job):
            await self._end(job, work)

    async def _end(self, job: PrefillJob, work: "asyncio.Task[Message | None]") -> None:
        await asyncio.wait([work])
        ending = PrefillStopped(request_id=job.request_id) if work.cancelled() else work.result()
        if ending is not None:
            self._counts.ended("stopped" if work.cancelled() else "failed")
        await self._give_back(job)
        if ending is not None:
            await self.conductors.answer(job.owner, ending)
        record_prefill_spans(job, ending, self.tracer, self.clock.now())

    async def _work(self, job: PrefillJob) -> Message | None:
        """A request from start to `PrefillDone`; what to tell of any other end."""
        try:
            self.entry.accept(job)
            await self.entry.take_pages(job)
            token = await self._compute(job)
            await self._settle(job)
            job.done_s = self.clock.now()
            done = self._done(job, token)
            self._counts.done(done, job.n_tokens)
            await self.conductors.answer(job.owner, done)
            await self.caching.keep(job)
        except PrefillRefused as refused:
            return PrefillFailed(
                request_id=job.request_id,
                reason=str(refused),
                retryable=refused.retryable,
                culprit=refused.culprit,
                invalid=refused.invalid,
            )
        except MessageTooLarge as error:  # scores of a long prompt: no try could send them
            return PrefillFailed(request_id=job.request_id, reason=str(error), retryable=False)
        except Exception as error:
            log.exception("prefill_failed", request_id=job.request_id)
            return PrefillFailed(request_id=job.request_id, reason=str(error), retryable=True)
        return None

    async def _compute(self, job: PrefillJob) -> int:
        """Fetch what is cached, make room for what is not, compute; the first token."""
        asking_since_s = self.clock.now()
        await self.caching.fetch(job, job.max_cached_tokens(self.layout))
        await self.caching.make_room(job)
        job.asking_s = self.clock.now() - asking_since_s
        self.queue.rebase(job.request_id, job.n_cached)
        token = self.computing.admit(job)
        await asyncio.wait([token])
        return token.result()

    async def _settle(self, job: PrefillJob) -> None:
        settling_since_s = self.clock.now()
        await await_completion(job, self.caching)
        job.settled_s = self.clock.now()
        job.drain_s = job.settled_s - settling_since_s

    def _done(self, job: PrefillJob, token: int) -> PrefillDone:
        n_new = 1  # of this try; `stopping` counts from here
        return PrefillDone(
            request_id=job.request_id,
            first_token=token,
            finish=finish_reason(job.start.stopping, n_new, token),
            n_cached=job.n_cached,
            queue_s=job.computing_since_s - job.arrived_s,
            compute_s=job.compute_s,
            drain_s=job.drain_s,
            fetched_bytes=job.n_cached * self.layout.token_bytes,
            fetch_s=job.fetch_s,
            fetched_from=job.fetched_from,
            score=job.first_scores[-1] if job.first_scores else None,
            prompt_scores=tuple(job.prompt_scores),
            times=job.times(self.clock.now()),
        )

    async def _give_back(self, job: PrefillJob) -> None:
        """Free all that a request holds, once nothing touches its pages any more."""
        request_id = job.request_id
        await self.computing.remove(request_id)
        await cancel_and_wait(job.transfers)
        await self.caching.give_back(job)
        self.entry.give_back(job)
        self.conductors.owners.remove(request_id)
        del self.jobs[request_id]
        del self._works[request_id]
        if not self.jobs:
            self._idle.set()

    # -- housekeeping ------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Say how busy it is."""
        while True:
            await self.conductors.probe_superseded(self.info, self.clock.now())
            await self.port.publish(
                PrefillLoad(
                    n_queued=len(self.queue),
                    queued_tokens=self.queue.queued_tokens,
                    free_pages=self.pages.n_free,
                    n_pages=self.pages.n_pages,
                )
            )
            await asyncio.sleep(_HOUSEKEEPING_S)

    def metrics(self) -> MetricSnapshot:
        """What the metrics show."""
        return {
            "halfmoon_prefill_requests": ("Requests here.", len(self.jobs)),
            "halfmoon_prefill_queued_tokens": (
                "Tokens still to compute.",
                self.queue.queued_tokens,
            ),
            **self._counts.metrics(),
            **page_metrics(self.pages),
            **self.replicas.metrics(),
        }

    def check(self) -> None:
        """Audit: pages are held by requests alone, and everything queued is a request."""
        self.queue.check()
        self.pages.check()
        held = [page for job in self.jobs.values() for page in job.pages]
        assert len(set(held)) == len(held), "a page belongs to two requests"
        assert len(held) + self.pages.n_free == self.pages.n_pages
        assert len(self.queue) <= len(self.jobs)
        assert self.jobs.keys() == self._works.keys() >= self.conductors.owners.request_ids()
