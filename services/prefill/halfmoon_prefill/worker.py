"""The prefill worker at work: from `StartPrefill` to `PrefillDone`, one task per request.

Each request's task gathers (pages, cached blocks, room at the home kvstore), waits for its
chunks to be computed, settles (all bytes acknowledged, fetched blocks verified), answers, and
keeps (commits the new blocks for reuse). One more task runs the forward passes in a thread.

Whatever way a request ends, its task gives everything back in `_give_back`, and only once no
forward pass and no transfer touches its pages or its landing any more. That is what
`PrefillStopped` and `PrefillFailed` promise.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
import xxhash

from halfmoon_prefill.forward import PrefillForward
from halfmoon_prefill.job import Job, Lease, Put
from halfmoon_prefill.kvstores import Kvstores, KvstoreUnavailable
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
from halfmoon_scheduling.decode_batch import finish_reason
from halfmoon_scheduling.pages import PageAllocator
from halfmoon_scheduling.prefill_queue import Chunk, PrefillQueue, QueueFull
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
    owners: Owners = field(default_factory=Owners, init=False)
    jobs: dict[RequestId, Job] = field(default_factory=dict, init=False)
    _tasks: dict[RequestId, asyncio.Task[None]] = field(default_factory=dict, init=False)
    #: The next token of each request that is being computed.
    _tokens: dict[RequestId, asyncio.Future[int]] = field(default_factory=dict, init=False)
    #: Requests in the forward pass that runs now.
    _in_forward: set[RequestId] = field(default_factory=set, init=False)
    _forward_over: asyncio.Condition = field(default_factory=asyncio.Condition, init=False)
    #: Set while no request is here.
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _work: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    #: Requests take pages in turn: a large one is not passed over for ever.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _pages_freed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.queue = PrefillQueue(
            chunk_tokens=self.settings.chunk_tokens, max_requests=self.settings.max_requests
        )
        self.layout = self.forward.engine.layout
        self._idle.set()

    async def serve(self) -> None:
        """Answer commands and compute until cancelled.

        Raises:
            LayoutMismatch: a conductor refused this worker, with its reason.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="forward") as thread:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._compute_forever(thread)),
                    tasks.create_task(self._keep_house()),
                ]
                try:
                    while True:
                        peer, message = await self.port.receive()
                        await self._handle(peer, message, tasks)
                finally:
                    for task in [*others, *self._tasks.values()]:
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
                if (task := self._tasks.get(request_id)) is not None:
                    task.cancel()  # it answers once its pages are quiet
                else:
                    await self._answer(peer, PrefillStopped(request_id=request_id))
            case Hello(conductor_id=conductor):
                for request_id in self.owners.greet(conductor, peer):
                    self._tasks[request_id].cancel()
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
        self._tasks[request_id] = tasks.create_task(self._run(job), name=f"prefill {request_id}")

    # -- one request -------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        """A request from start to end; every outcome but success is reported at the end."""
        outcome: Message | None = None
        try:
            self._accept(job)
            await self._take_pages(job)
            await self._gather(job)
            token = await self._computed(job)
            await self._settle(job)
            await self._answer(job.owner, self._done(job, token))
            await self._keep(job)
        except _Refused as refused:
            outcome = PrefillFailed(
                request_id=job.request_id,
                reason=str(refused),
                retryable=refused.retryable,
                culprit=refused.culprit,
            )
        except asyncio.CancelledError:
            outcome = PrefillStopped(request_id=job.request_id)
        except Exception as error:
            log.exception("prefill_failed", request_id=job.request_id)
            outcome = PrefillFailed(request_id=job.request_id, reason=str(error), retryable=True)
        await self._give_back(job)
        if outcome is not None:
            await self._answer(job.owner, outcome)

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

    async def _gather(self, job: Job) -> None:
        """Start fetching what is cached, make room for what is not, and let it be computed."""
        await self._lease(job)
        await self._reserve(job)
        self.queue.rebase(job.request_id, job.n_cached)
        self._tokens[job.request_id] = asyncio.get_running_loop().create_future()
        self.queue.ready(job.request_id)
        self._work.set()

    async def _lease(self, job: Job) -> None:
        cached = job.start.cached
        if cached is None:
            return
        n_blocks = min(cached.n_blocks, self._most_cached(job) // self.layout.block_size)
        hashes = job.start.block_hashes[:n_blocks]
        if not hashes:
            return
        try:
            kvstore = await self.kvstores.at(cached.kvstore)
            leased = await kvstore.lease(self.layout, hashes)
        except KvstoreUnavailable as error:
            log.info("cache_not_used", request_id=job.request_id, reason=str(error))
            return
        if not leased.places:
            return
        job.lease = Lease(kvstore, leased.ticket, leased.region, leased.places, leased.expires_s)
        job.n_cached = len(leased.places) * self.layout.block_size
        began = self.clock.now()
        job.loads = [
            self.transfer.submit(
                "read",
                job.load_pieces(self.memory.region, self.layout, layer),
                deadline_s=max(job.write_until_s - began, 0.001),
            )
            for layer in range(self.layout.n_layers)
        ]
        job.loads[-1].add_done_callback(lambda _: setattr(job, "fetch_s", self.clock.now() - began))

    async def _reserve(self, job: Job) -> None:
        start = job.start
        if start.store_in is None or not start.block_hashes:
            return
        size = self.layout.block_size
        is_home = start.cached is not None and start.cached.kvstore == start.store_in
        first = job.n_cached // size if is_home else 0
        hashes = start.block_hashes[first:]
        if not hashes:
            return
        try:
            kvstore = await self.kvstores.at(start.store_in)
            reserved = await kvstore.reserve(
                self.layout,
                hashes,
                start.block_hashes[first - 1] if first else None,
                start.token_ids[first * size : len(start.block_hashes) * size],
            )
        except KvstoreUnavailable as error:
            log.info("blocks_not_kept", request_id=job.request_id, reason=str(error))
            return
        index = {block: i for i, block in enumerate(start.block_hashes)}
        offsets = {index[place.hash]: place.offset for place in reserved.places}
        job.put = Put(kvstore, reserved.ticket, reserved.region, offsets)

    async def _computed(self, job: Job) -> int:
        """Wait until all its chunks have run; leases of long reads are renewed meanwhile."""
        future = self._tokens[job.request_id]
        while True:
            pause_s = job.lease.expires_s / 3 if job.lease else None
            done, _ = await asyncio.wait([future], timeout=pause_s)
            if done:
                return future.result()
            if job.lease is not None:
                await job.lease.kvstore.renew(job.lease.ticket)

    async def _settle(self, job: Job) -> None:
        """Wait for the landing's acknowledgements and verify what was fetched.

        Raises:
            _Refused: some KV did not arrive, or did not arrive as it was stored.
        """
        settling_since = self.clock.now()
        decode = WorkerId(job.start.landing.region.segment)
        source = job.start.cached.kvstore.worker_id if job.start.cached else None
        try:
            for load in job.loads:
                await load
        except TransferError as error:
            raise _Refused(
                f"cached blocks did not come: {error}", retryable=True, culprit=source
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
        if job.lease is not None:
            wanted = tuple(place.checksum for place in job.lease.places)
            found = await self._checksums(job.pages[: len(wanted)])
            if found != wanted:
                raise _Refused(
                    f"a block from {source} is not what was stored there",
                    retryable=True,
                    culprit=source,
                )
            await job.lease.kvstore.release(job.lease.ticket)
            job.lease = None
        job.drain_s = self.clock.now() - settling_since

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

    async def _keep(self, job: Job) -> None:
        """Commit the new blocks at the home kvstore; without them the answer stands too."""
        put = job.put
        if put is None:
            return
        try:
            for write in job.put_writes:
                await write
            written = [job.pages[block] for block in sorted(put.offsets)]
            await put.kvstore.commit(put.ticket, await self._checksums(written))
            job.put = None
        except (TransferError, KvstoreUnavailable) as error:
            log.info("blocks_not_kept", request_id=job.request_id, reason=str(error))

    async def _checksums(self, pages: Sequence[int]) -> tuple[int, ...]:
        size = self.layout.block_bytes
        view = self.memory.view

        def compute() -> tuple[int, ...]:
            return tuple(
                xxhash.xxh3_64_intdigest(view[page * size : (page + 1) * size]) for page in pages
            )

        return await asyncio.to_thread(compute)

    async def _give_back(self, job: Job) -> None:
        """Free all that a request holds, once nothing touches its pages any more."""
        request_id = job.request_id
        self.queue.remove(request_id)
        async with self._forward_over:
            await self._forward_over.wait_for(lambda: request_id not in self._in_forward)
        await _quiet(job.transfers)
        if job.lease is not None:
            await job.lease.kvstore.release(job.lease.ticket)
        if job.put is not None:
            await job.put.kvstore.revoke(job.put.ticket)
        self.pages.release(job.pages)
        self._pages_freed.set()
        self.owners.drop(request_id)
        self._tokens.pop(request_id, None)
        del self.jobs[request_id]
        del self._tasks[request_id]
        if not self.jobs:
            self._idle.set()

    # -- forward passes ----------------------------------------------------------------------

    async def _compute_forever(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            chunks = self.queue.next_batch()
            if not chunks:
                self._work.clear()
                await self._work.wait()
                continue
            batch = [(self.jobs[chunk.request_id], chunk) for chunk in chunks]
            self._in_forward = {chunk.request_id for chunk in chunks}
            try:
                tokens = await loop.run_in_executor(thread, self.forward, batch)
            except Exception as error:
                log.exception("forward_failed", n_requests=len(batch))
                for chunk in chunks:
                    self.queue.remove(chunk.request_id)
                    self._resolve(chunk.request_id, error)
            else:
                self.queue.advance(chunks)
                self._hand_out(chunks, tokens)
            finally:
                async with self._forward_over:
                    self._in_forward = set()
                    self._forward_over.notify_all()

    def _hand_out(self, chunks: Sequence[Chunk], tokens: Sequence[int | None]) -> None:
        for chunk, token in zip(chunks, tokens, strict=True):
            if token is not None:
                self._resolve(chunk.request_id, token)

    def _resolve(self, request_id: RequestId, outcome: int | Exception) -> None:
        future = self._tokens.get(request_id)
        if future is None or future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

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
                if (task := self._tasks.get(request_id)) is not asyncio.current_task() and task:
                    task.cancel()

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
