"""Perform the prefill machine's commands: the steps of each request, one at a time.

`PrefillMachine` decides what comes next; here it is done, and its outcome is posted back as an
event. A task takes the steps of a request that follow at once upon each other. `ReleaseHoldings`
may come at any moment: then the step under way is cancelled and waited for, before what the
request holds is given back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, assert_never

import structlog

from halfmoon_prefix_cache.prefix_fetch import cancel_and_wait
from halfmoon_prefix_cache.write_settling import settle_writes
from halfmoon_protocol import error_codes
from halfmoon_protocol.errors import MessageTooLarge
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import Message, PrefillDone
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.membership import LEASE_S
from halfmoon_runtime.observability.logs import bind_request
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.task_errors import raising_task_errors
from halfmoon_runtime.worker.request_owners import RequestOwners
from halfmoon_scheduling.prefill.prefill_commands import (
    EndRequest,
    FetchPrefix,
    FreeSlot,
    KeepBlocks,
    PrefillCommand,
    PrefillEnding,
    PrefillStop,
    ReleaseHoldings,
    ReportDone,
    ReserveRoom,
    SendChunk,
    SettleTransfers,
    StartStages,
    WakeEngine,
    ending_message,
)
from halfmoon_scheduling.prefill.prefill_events import (
    BlocksKept,
    DoneReported,
    HoldingsReleased,
    PrefillCancelled,
    PrefillEvent,
    PrefillFailure,
    PrefillRequested,
    PrefixFetched,
    PrefixLeased,
    RoomRefused,
    RoomReserved,
    StepFailed,
    TransfersSettled,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine
from halfmoon_transfer import TransferEngine
from halfmoon_transfer.interface import Cancelled, Transfer
from halfmoon_workers.prefill.completion import await_completion, fetch_failure
from halfmoon_workers.prefill.group_steps import GroupSteps, share_ending
from halfmoon_workers.prefill.peer_endpoint_cache import meet_peer
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_metrics import PrefillCounts
from halfmoon_workers.prefill.prefill_refusal import PrefillRefused
from halfmoon_workers.prefill.prefill_spans import record_prefill_spans
from halfmoon_workers.prefill.prefix_cache_client import PrefixCacheClient

log = structlog.get_logger()

#: Does one thing for a request, and returns what came of it.
Step = Callable[[PrefillJob], Awaitable[PrefillEvent]]
#: Sends a conductor a message.
Answer = Callable[[PeerId, Message], Coroutine[Any, Any, None]]


class PrefillShell:
    """The requests of one worker, between its machine and the world."""

    def __init__(
        self,
        machine: PrefillMachine,
        caching: PrefixCacheClient,
        owners: RequestOwners,
        answer: Answer,
        clock: Clock,
        *,
        token_bytes: int,
        wake_engine: Callable[[], None],
        tracer: Tracer | None,
        on_ended: Callable[[PrefillJob], None] = lambda _: None,
        groups: GroupSteps | None = None,
        transfer: TransferEngine | None = None,
    ) -> None:
        """Create a shell without requests; it performs commands after `open`.

        Args:
            machine: decides; it gets its events from this shell alone.
            caching: deals with kvstores.
            owners: of exactly the requests here.
            answer: sends a conductor a message.
            clock: of all times.
            token_bytes: bytes of KV per token.
            wake_engine: makes the forward loop look for a pass; must not wait.
            tracer: None: no traces.
            on_ended: called for each request once nothing touches its pages; must not wait.
            groups: steps of prompts that a group computes; None: the worker is in no group.
            transfer: writes to landings; None: prompts are computed in their landings.
        """
        self._transfer = transfer
        self._groups_or_none = groups
        self._machine = machine
        self._caching = caching
        self._owners = owners
        self._answer = answer
        self._clock = clock
        self._token_bytes = token_bytes
        self._wake_engine = wake_engine
        self._tracer = tracer
        self._on_ended = on_ended
        self.counts = PrefillCounts()
        #: Requests from their arrival until their ending is about to be answered.
        self.jobs: dict[RequestId, PrefillJob] = {}
        #: Set while no request is here.
        self.idle = asyncio.Event()
        self.idle.set()
        #: Parent of all steps; None while the worker does not serve.
        self._tasks: asyncio.TaskGroup | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Perform commands from now on, in tasks of this group."""
        self._tasks = tasks

    def close(self) -> None:
        """Perform no more commands: the group of tasks is about to be cancelled."""
        self._tasks = None

    def begin(
        self,
        job: PrefillJob,
        failure: PrefillFailure | None,
        requested: PrefillRequested | None = None,
    ) -> None:
        """Take a request in.

        Args:
            job: its id is not in use here.
            failure: why it can't be prefilled here; None: the machine gets it.
            requested: what the machine gets; None: a whole prompt.
        """
        self.jobs[job.request_id] = job
        self.idle.clear()
        self._owners.add(job.request_id, job.owner)
        if failure is None:
            self.post(requested or PrefillRequested(job.start))
        else:
            self._end(job, failure)

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up; its ending is answered once nothing touches its pages.

        A forward pass that it is in goes on for the others. No further layer of it is written.
        """
        job = self.jobs.get(request_id)
        if job is not None and job.failure is None:
            job.failure = Cancelled("the request was given up")
        self.post(PrefillCancelled(request_id))

    def post(self, event: PrefillEvent) -> None:
        """Let the machine handle an event, and begin what follows from it."""
        if self._tasks is not None:
            for command in self._machine.handle(event, self._clock.now()):
                self._perform(command)

    # -- commands ----------------------------------------------------------------------------

    def _perform(self, command: PrefillCommand) -> None:
        match command:
            case WakeEngine():
                self._wake_engine()
            case FetchPrefix(request_id=request_id, pages=pages, n_blocks=n_blocks):
                job = self.jobs[request_id]
                job.pages = job.pages if job.in_place else list(pages)
                if job.order is not None:
                    self._begin_step(job, lambda job: self._open_share(job, n_blocks))
                elif n_blocks > job.n_held_in_place or not self._knows_decode(job):
                    self._begin_step(job, lambda job: self._fetch(job, command))
                else:
                    self.post(_in_place(job, n_blocks))
            case ReserveRoom(request_id=request_id, first_block=first):
                self._begin_step(self.jobs[request_id], lambda job: self._reserve(job, first))
            case StartStages(request_id=request_id):
                self._begin_step(self.jobs[request_id], self._groups.start_stages)
            case SendChunk(request_id=request_id):
                self._send_chunk(self.jobs[request_id], command)
            case FreeSlot(request_id=request_id, slot=slot):
                job = self.jobs[request_id]
                freed = self._answer(job.owner, self._groups.free_slot(job, slot))
                self._create_task(freed, f"slot of {request_id}")
            case SettleTransfers(request_id=request_id):
                self._begin_step(self.jobs[request_id], self._settle)
            case ReportDone(request_id=request_id):
                self._begin_step(self.jobs[request_id], lambda job: self._report(job, command))
            case KeepBlocks(request_id=request_id):
                self._begin_step(self.jobs[request_id], self._keep)
            case ReleaseHoldings(request_id=request_id):
                job = self.jobs[request_id]
                if job.between_steps:
                    self._begin_step(job, self._release)
                else:
                    self._create_task(self._stop(job), f"stop of {request_id}")
            case EndRequest(request_id=request_id, ending=ending):
                self._end(self.jobs[request_id], ending)
            case _:
                assert_never(command)

    def _begin_step(self, job: PrefillJob, step: Step) -> None:
        job.next_step = step
        if not job.between_steps:
            job.steps = self._create_task(self._run(job), f"prefill {job.request_id}")

    def _create_task(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        assert self._tasks is not None, "commands are performed while the worker serves"
        return self._tasks.create_task(work, name=name)

    async def _run(self, job: PrefillJob) -> None:
        """Take the steps of a request and post what came of each, until none follows at once."""
        bind_request(job.request_id)  # also on the lines of libraries that steps call
        while (step := job.next_step) is not None:
            job.next_step = None
            event = await self._outcome(job, step)
            job.between_steps = True
            self.post(event)
            job.between_steps = False

    async def _outcome(self, job: PrefillJob, step: Step) -> PrefillEvent:
        """Take a step; an error is an outcome as well."""
        try:
            return await step(job)
        except PrefillRefused as refused:
            return StepFailed(job.request_id, refused.failure)
        except MessageTooLarge as error:  # scores of a long prompt: no try could send them
            failure = PrefillFailure(str(error), retryable=False, code=error_codes.TOO_LONG)
            return StepFailed(job.request_id, failure)
        except Exception as error:
            log.exception("prefill_failed", request_id=job.request_id)
            failure = PrefillFailure(str(error), retryable=True, code=error_codes.INTERNAL_ERROR)
            return StepFailed(job.request_id, failure)

    # -- steps -------------------------------------------------------------------------------

    async def _fetch(self, job: PrefillJob, command: FetchPrefix) -> PrefillEvent:
        """Lease the prefix and start to read it; reserve room meanwhile, if that is wanted."""
        if self._transfer is not None:
            # A worker that lives writes its record again within a lease.
            until_s = min(job.write_until_s, self._clock.now() + LEASE_S)
            region = job.start.landing.region
            await meet_peer(self._transfer, region, lambda: self._clock.now() < until_s)
        if command.n_blocks <= job.n_held_in_place:
            return _in_place(job, command.n_blocks)
        reserving = None
        with raising_task_errors(PrefillRefused):  # which `_outcome` knows
            async with asyncio.TaskGroup() as asking:
                if command.reserve_from is not None:
                    room = self._caching.make_room(job, command.reserve_from)
                    reserving = asking.create_task(room)
                await self._caching.fetch(job, command.n_blocks)
        has_room = None if reserving is None else reserving.result()
        if has_room or job.lease is not None:
            self._hold(job)
        n_held = job.n_held_in_place
        if job.lease is None:
            return PrefixLeased(job.request_id, n_blocks=n_held, has_room=has_room)
        self._watch_fetch(job)
        n_blocks = n_held + len(job.lease.places)
        return PrefixLeased(job.request_id, job.lease.address, n_blocks, has_room)

    def _knows_decode(self, job: PrefillJob) -> bool:
        """Return whether the landing can be written to without a look at the metadata server."""
        region = job.start.landing.region
        return self._transfer is None or self._transfer.knows_peer(
            region.segment, region.generation
        )

    @property
    def _groups(self) -> GroupSteps:
        assert self._groups_or_none is not None, "this worker is in no group"
        return self._groups_or_none

    async def _open_share(self, job: PrefillJob, n_blocks: int) -> PrefillEvent:
        leased = await self._groups.open_share(job, n_blocks)
        if n_blocks:
            self._watch_fetch(job)
        return leased

    def _watch_fetch(self, job: PrefillJob) -> None:
        """Post how the reads of the cached prefix end."""
        # Soon, not now: the last layer may be here already, and the lease is posted first.
        loop = asyncio.get_running_loop()

        def on_last_layer(last: Transfer) -> None:  # in the thread that carried it
            with suppress(RuntimeError):  # the loop is closed, and the worker with it
                loop.call_soon_threadsafe(self._on_fetched, job, last)

        job.loads[-1].add_done_callback(on_last_layer)

    def _on_fetched(self, job: PrefillJob, last_layer: Transfer) -> None:
        """Post how the reads ended; called in the event loop's thread."""
        try:
            last_layer.result()
        except Exception as error:
            self.post(StepFailed(job.request_id, fetch_failure(job, error)))
        else:
            self.post(PrefixFetched(job.request_id))

    async def _reserve(self, job: PrefillJob, first_block: int) -> PrefillEvent:
        if not await self._caching.make_room(job, first_block):
            return RoomRefused(job.request_id)
        self._hold(job)
        return RoomReserved(job.request_id)

    def _hold(self, job: PrefillJob) -> None:
        """Renew what the request holds at kvstores, from now until `_release`."""
        if job.renewal is None:
            name = f"renewal for {job.request_id}"
            job.renewal = self._create_task(self._caching.renew_until_cancelled(job), name)

    def _send_chunk(self, job: PrefillJob, command: SendChunk) -> None:
        """Write a chunk's activations to the next stage, beside the steps of its request."""
        write, before = self._groups.begin_send(job, command), job.announcing

        async def announce() -> None:
            try:
                await self._groups.announce_chunk(job, command, write, before)
            except PrefillRefused as refused:
                self.post(StepFailed(job.request_id, refused.failure))

        job.announcing = self._create_task(announce(), f"chunk of {job.request_id}")

    async def _settle(self, job: PrefillJob) -> PrefillEvent:
        await await_completion(job, self._caching, self._transfer)
        if job.announcing is not None:  # the next stage is told of the last chunk, too
            await asyncio.wait([job.announcing])
        token = None if job.group is None else await job.group.wait_done()
        job.settled_s = self._clock.now()
        return TransfersSettled(job.request_id, token)

    async def _report(self, job: PrefillJob, done: ReportDone) -> PrefillEvent:
        job.done_s = self._clock.now()
        if job.order is not None:
            await self._groups.report_share(job, done)
            return DoneReported(job.request_id)
        if job.group is not None:  # the last stage has chosen and scored
            last = job.group.dones[-1]
            job.first_scores = [] if last.score is None else [last.score]
            job.prompt_scores = list(last.prompt_scores)
        assert done.first_token is not None, "a prompt is done without its first token"
        n_held = job.n_held_in_place * job.start.landing.layout.block_size
        message = PrefillDone(
            request_id=job.request_id,
            first_token=done.first_token,
            finish=done.finish,
            n_cached=done.n_cached,
            queue_s=done.queue_s,
            compute_s=done.compute_s,
            drain_s=done.drain_s,
            fetched_bytes=(done.n_cached - n_held) * self._token_bytes,
            fetch_s=job.fetch_s,
            fetched_from=job.fetched_from,
            score=job.first_scores[-1] if job.first_scores else None,
            prompt_scores=tuple(job.prompt_scores),
            times=done.times,
        )
        self.counts.done(message, job.n_tokens)
        await self._answer(job.owner, message)
        await self._caching.release_lease(job)
        return DoneReported(job.request_id)

    async def _keep(self, job: PrefillJob) -> PrefillEvent:
        if job.order is not None:
            await self._groups.keep_share(job)
        elif job.group is None or await self._groups.read_back(job):
            await self._caching.keep(job)
        return BlocksKept(job.request_id)

    async def _stop(self, job: PrefillJob) -> None:
        """End a request in the middle of a step, or while it waits for one."""
        if job.steps is not None:
            job.steps.cancel()
            await asyncio.wait([job.steps])
        self.post(await self._release(job))

    async def _release(self, job: PrefillJob) -> PrefillEvent:
        """Give back all that a request holds but its pages; no forward pass touches those."""
        if job.group is not None:
            limit_s = max(0.0, job.write_until_s - self._clock.now())
            job.landing_in_doubt = await job.group.stop(limit_s)
        await cancel_and_wait(job.transfers)
        region = job.start.landing.region
        if self._transfer is not None and not await settle_writes(self._transfer, region):
            job.landing_in_doubt = True
        if job.announcing is not None:
            job.announcing.cancel()
            await asyncio.wait([job.announcing])
        if not job.share.is_whole:
            await self._groups.close(job)
        try:
            await self._caching.give_back(job)
        except Exception:  # its pages are untouched all the same, and what it holds expires
            log.exception("holdings_not_released", request_id=job.request_id)
        if job.renewal is not None:
            job.renewal.cancel()
        return HoldingsReleased(job.request_id)

    def _end(self, job: PrefillJob, ending: PrefillEnding) -> None:
        """Forget a request, and answer an ending that is no success."""
        del self.jobs[job.request_id]
        self._owners.remove(job.request_id)
        self._on_ended(job)
        if ending is None:
            self.counts.landed(job.n_sent_bytes, job.n_held_bytes)
            self.counts.n_shares += not job.share.is_whole
        if ending is not None:
            self.counts.ended("stopped" if isinstance(ending, PrefillStop) else "failed")
        if not self.jobs:
            self.idle.set()
        message = ending_message(job.request_id, ending, landing_in_doubt=job.landing_in_doubt)
        said = message if job.order is None else share_ending(job, ending)
        if said is not None:
            answer = self._answer(job.owner, said)
            self._create_task(answer, f"ending of {job.request_id}")
        record_prefill_spans(job, message, self._tracer, self._clock.now())

    def check(self) -> None:
        """Audit: the machine's requests are jobs here, and each has its pages."""
        self._machine.check()
        for request_id, request in self._machine.requests.items():
            job = self.jobs[request_id]
            assert job.in_place or job.pages == request.pages
        assert self.jobs.keys() >= self._machine.requests.keys()
        assert self.jobs.keys() >= self._owners.request_ids()


def _in_place(job: PrefillJob, n_blocks: int) -> PrefixLeased:
    """Note a prefix of which nothing has to be fetched."""
    job.n_cached = n_blocks * job.start.landing.layout.block_size
    return PrefixLeased(job.request_id, n_blocks=n_blocks)
