"""The prefill worker at work: from `StartPrefill` to `PrefillDone`, one task per request.

Each request's task takes pages, fetches cached blocks and makes room for new ones (`caching`),
has its chunks computed (`computing`), settles (all bytes acknowledged, fetched blocks
verified), answers, and keeps the new blocks for reuse.

Whatever way a request ends, its task gives everything back in `_give_back`, and only once no
forward pass and no transfer touches its pages or its landing any more. That is what
`PrefillStopped` and `PrefillFailed` promise.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from halfmoon_prefill.caching import BadBlock, Caching
from halfmoon_prefill.computing import Computing
from halfmoon_prefill.forward import PrefillForward
from halfmoon_prefill.job import Job
from halfmoon_prefill.kvstores import Kvstores
from halfmoon_prefill.settings import PrefillSettings
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.messages import (
    Cancel,
    Hello,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    StartPrefill,
    Unwelcome,
    Welcome,
    WorkerInfo,
)
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.gauges import Readings
from halfmoon_runtime.network import PeerId, PeerUnreachable, Port
from halfmoon_runtime.owners import Owners
from halfmoon_runtime.telemetry import bind_request
from halfmoon_scheduling.decode_batch import finish_reason
from halfmoon_scheduling.pages import PageAllocator
from halfmoon_scheduling.prefill_queue import PrefillQueue, QueueFull
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Transfer, TransferError
from halfmoon_transfer.regions import Memory

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.1


class _Refused(Exception):
    """This worker can't do the request, now or ever."""

    def __init__(self, reason: str, *, retryable: bool, culprit: WorkerId | None = None) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.culprit = culprit


@dataclass
class PrefillWorker:
    """Serves one port with one engine over one pool."""

    port: Port
    forward: PrefillForward
    transfer: TransferEngine
    memory: Memory
    kvstores: Kvstores
    info: WorkerInfo
    settings: PrefillSettings
    clock: Clock
    pages: PageAllocator
    queue: PrefillQueue = field(init=False)
    computing: Computing = field(init=False)
    caching: Caching = field(init=False)
    owners: Owners = field(default_factory=Owners, init=False)
    jobs: dict[RequestId, Job] = field(default_factory=dict, init=False)
    #: What is being done for each of `jobs`; cancelled to stop it.
    _works: dict[RequestId, "asyncio.Task[Message | None]"] = field(
        default_factory=dict, init=False
    )
    #: Set while no request is here.
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    #: Requests take pages in turn: a large one is not passed over for ever.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _pages_freed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.queue = PrefillQueue(
            chunk_tokens=self.settings.chunk_tokens, max_requests=self.settings.max_requests
        )
        self.layout = self.forward.engine.layout
        self.computing = Computing(self.queue, self.forward)
        self.caching = Caching(self.kvstores, self.transfer, self.memory, self.layout, self.clock)
        self._idle.set()

    async def serve(self) -> None:
        """Answer commands and compute until cancelled.

        Raises:
            LayoutMismatch: a conductor refused this worker, with its reason.
        """
        async with asyncio.TaskGroup() as tasks:
            others = [
                tasks.create_task(self.computing.run()),
                tasks.create_task(self._keep_house()),
            ]
            try:
                while True:
                    peer, message = await self.port.receive()
                    await self._handle(peer, message, tasks)
            finally:
                # The works' endings give back what they hold while `computing` still runs.
                for work in self._works.values():
                    work.cancel()
                for task in others:
                    task.cancel()

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Say that nothing new is taken, and finish what is here, for so long at the most."""
        self.info = info
        for peer in list(self.owners.conductors.values()):
            await self._answer(peer, Welcome(worker=info))
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    # -- commands ----------------------------------------------------------------------------

    async def _handle(self, peer: PeerId, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message:
            case StartPrefill():
                self._on_start(peer, message, tasks)
            case Cancel(request_id=request_id):
                if (work := self._works.get(request_id)) is not None:
                    work.cancel()  # `_run` answers once its pages are quiet
                else:
                    await self._answer(peer, PrefillStopped(request_id=request_id))
            case Hello(conductor_id=conductor):
                for request_id in self.owners.greet(conductor, peer):
                    self._works[request_id].cancel()
                await self._answer(peer, Welcome(worker=self.info))
            case Unwelcome(reason=reason):
                raise LayoutMismatch(reason)
            case _:
                log.warning("unexpected_message", message_type=type(message).__name__)

    def _on_start(self, peer: PeerId, start: StartPrefill, tasks: asyncio.TaskGroup) -> None:
        request_id = start.request_id
        if request_id in self.jobs:
            log.warning("duplicate_start_ignored", request_id=request_id)
            return
        now = self.clock.now()
        job = Job(start, peer, now, now + start.landing_expires_s)
        self.jobs[request_id] = job
        self._idle.clear()
        self.owners.add(request_id, peer)
        with bind_request(request_id):  # also on the lines of libraries that it calls
            work = tasks.create_task(self._work(job), name=f"prefill {request_id}")
            self._works[request_id] = work
            tasks.create_task(self._run(job, work), name=f"ending of prefill {request_id}")

    # -- one request -------------------------------------------------------------------------

    async def _run(self, job: Job, work: "asyncio.Task[Message | None]") -> None:
        """See a request to its end, give back what it held, and only then say so.

        `work` may be cancelled at any moment, also before its first step and more than once;
        this task is not, as long as the worker serves.
        """
        await asyncio.wait([work])
        ending = PrefillStopped(request_id=job.request_id) if work.cancelled() else work.result()
        await self._give_back(job)
        if ending is not None:
            await self._answer(job.owner, ending)

    async def _work(self, job: Job) -> Message | None:
        """A request from start to `PrefillDone`; what to tell of any other end."""
        try:
            self._accept(job)
            await self._take_pages(job)
            token = await self._compute(job)
            await self._settle(job)
            await self._answer(job.owner, self._done(job, token))
            await self.caching.keep(job)
        except _Refused as refused:
            return PrefillFailed(
                request_id=job.request_id,
                reason=str(refused),
                retryable=refused.retryable,
                culprit=refused.culprit,
            )
        except Exception as error:
            log.exception("prefill_failed", request_id=job.request_id)
            return PrefillFailed(request_id=job.request_id, reason=str(error), retryable=True)
        return None

    def _accept(self, job: Job) -> None:
        """Take it into the queue, not ready yet, so that it keeps its place.

        Raises:
            _Refused: another layout than the landing's, a prompt over the pool, a full queue.
        """
        start = job.start
        try:
            self.layout.require_same(
                start.landing.layout, self.info.worker_id, start.landing.region.segment
            )
        except LayoutMismatch as error:
            raise _Refused(str(error), retryable=False) from None
        needed = self.layout.blocks_for(job.n_tokens)
        if needed > self.pages.n_pages or needed > len(start.landing.pages):
            raise _Refused(
                f"{job.n_tokens} tokens need {needed} pages: the pool has {self.pages.n_pages},"
                f" the landing {len(start.landing.pages)}",
                retryable=False,
            )
        hoped = start.cached.n_blocks * self.layout.block_size if start.cached else 0
        try:
            self.queue.push(
                job.request_id,
                n_tokens=job.n_tokens,
                n_cached=min(hoped, self._most_cached(job)),
                ready=False,
            )
        except QueueFull as error:
            raise _Refused(str(error), retryable=True) from None

    def _most_cached(self, job: Job) -> int:
        """Tokens that may come from a cache: whole blocks, and at least one is computed."""
        return (job.n_tokens - 1) // self.layout.block_size * self.layout.block_size

    async def _take_pages(self, job: Job) -> None:
        needed = self.layout.blocks_for(job.n_tokens)
        async with self._turn:
            while self.pages.n_free < needed:
                self._pages_freed.clear()
                await self._pages_freed.wait()
            job.pages = self.pages.allocate(needed)

    async def _compute(self, job: Job) -> int:
        """Fetch what is cached, make room for what is not, compute; the first token."""
        await self.caching.fetch(job, self._most_cached(job))
        await self.caching.make_room(job)
        self.queue.rebase(job.request_id, job.n_cached)
        token = self.computing.admit(job)
        while True:
            # A long prompt may outlast its lease.
            pause_s = job.lease.expires_s / 3 if job.lease else None
            done, _ = await asyncio.wait([token], timeout=pause_s)
            if done:
                return token.result()
            await self.caching.renew(job)

    async def _settle(self, job: Job) -> None:
        """Wait for the landing's acknowledgements and verify what was fetched.

        Raises:
            _Refused: some KV did not arrive, or did not arrive as it was stored.
        """
        settling_since_s = self.clock.now()
        decode = WorkerId(job.start.landing.region.segment)
        source = job.start.cached.kvstore.worker_id if job.start.cached else None
        try:
            for load in job.loads:
                await load
            await self.caching.verify(job)
        except (TransferError, BadBlock) as error:
            raise _Refused(
                f"cached blocks are of no use: {error}", retryable=True, culprit=source
            ) from None
        if job.failure is not None:
            raise _Refused(str(job.failure), retryable=True)
        try:
            for write in job.landing_writes:
                await write
        except TransferError as error:
            raise _Refused(
                f"KV did not reach {decode}: {error}", retryable=True, culprit=decode
            ) from None
        job.drain_s = self.clock.now() - settling_since_s

    def _done(self, job: Job, token: int) -> PrefillDone:
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
        )

    async def _give_back(self, job: Job) -> None:
        """Free all that a request holds, once nothing touches its pages any more."""
        request_id = job.request_id
        await self.computing.remove(request_id)
        await _quiet(job.transfers)
        await self.caching.give_back(job)
        self.pages.release(job.pages)
        self._pages_freed.set()
        self.owners.drop(request_id)
        del self.jobs[request_id]
        del self._works[request_id]
        if not self.jobs:
            self._idle.set()

    # -- housekeeping ------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Say how busy it is."""
        while True:
            await self.port.publish(
                PrefillLoad(
                    n_queued=len(self.queue),
                    queued_tokens=self.queue.queued_tokens,
                    free_pages=self.pages.n_free,
                    n_pages=self.pages.n_pages,
                )
            )
            await asyncio.sleep(_HOUSEKEEPING_S)

    async def _answer(self, peer: PeerId, message: Message) -> None:
        try:
            await self.port.send(peer, message)
        except PeerUnreachable as gone:
            orphans = self.owners.leave(peer)
            if orphans:
                log.warning("conductor_gone", reason=str(gone), n_requests=len(orphans))
            for request_id in orphans:
                self._works[request_id].cancel()

    def readings(self) -> Readings:
        """What the metrics show."""
        return {
            "halfmoon_prefill_requests": ("Requests here.", len(self.jobs)),
            "halfmoon_prefill_queued_tokens": (
                "Tokens still to compute.",
                self.queue.queued_tokens,
            ),
            "halfmoon_pages_free": ("Pages that nobody holds.", self.pages.n_free),
            "halfmoon_pages": ("Pages of the pool.", self.pages.n_pages),
        }

    def check(self) -> None:
        """Audit: pages are held by requests alone, and everything queued is a request."""
        self.queue.check()
        self.pages.check()
        held = [page for job in self.jobs.values() for page in job.pages]
        assert len(set(held)) == len(held), "a page belongs to two requests"
        assert len(held) + self.pages.n_free == self.pages.n_pages
        assert len(self.queue) <= len(self.jobs)


async def _quiet(transfers: Sequence[Transfer]) -> None:
    """Stop what is under way and wait until it is over."""
    for transfer in transfers:
        transfer.cancel()
    for transfer in transfers:
        try:
            await transfer
        except TransferError:
            continue
