"""Serve conductors as a prefill worker: from `StartPrefill` to `PrefillDone`.

`PrefillMachine` decides the steps of each request (pages, cached prefix, room for new blocks,
forward passes, settling, keeping). `PrefillShell` performs them, `ForwardLoop` runs the forward
passes. Here are the messages, the load reports and the metrics.

`PrefillStopped` and `PrefillFailed` promise that nothing writes to the landing any more. So a
request's pages are free only once no forward pass and no transfer touches them.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import assert_never

from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    ChangeRole,
    ChunkSent,
    Hello,
    PrefillCost,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ShareEnded,
    ShareProgress,
    SlotFreed,
    StartPrefill,
    StartShare,
    StopShare,
    ToFurtherStage,
    ToPrefill,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.housekeeping import HousekeepingPace
from halfmoon_runtime.worker.message_loop import drop_unexpected, serve_messages
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.chunk_flow import SLOTS_PER_SHARE
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks
from halfmoon_scheduling.prefill.prefill_events import (
    ChunkArrived,
    NextSlotFreed,
    PrefillFailure,
    PrefillRequested,
)
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_scheduling.prefill.prompt_share import PromptShare
from halfmoon_scheduling.prefill.queue_order import QUEUE_ORDERS
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.prefill.forward_loop import ForwardLoop
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.group_prompt import GroupPrompt
from halfmoon_workers.prefill.group_steps import GroupSteps
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_metrics import page_metrics, queue_metrics, replica_metrics
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_shell import PrefillShell
from halfmoon_workers.prefill.prefill_validation import start_failure
from halfmoon_workers.prefill.prefix_cache_client import PrefixCacheClient
from halfmoon_workers.prefill.share_validation import (
    as_start,
    share_failure,
    stage_alone_failure,
    stages_fault,
)
from halfmoon_workers.prefill.stage_links import StageLinks
from halfmoon_workers.start.role_switch import RoleSwitch

#: Seconds between two reports of a share to stage 0.
_PROGRESS_S = 1.0


@dataclass
class PrefillWorker:
    """Serve one port with one engine over one pool."""

    port: Port
    forward: PrefillForward
    transfer: TransferEngine
    memory: PoolMemory
    kvstores: KvstoreClients
    info: WorkerInfo
    settings: PrefillSettings
    clock: Clock
    pages: PageAllocator
    #: To the other stages of its group; None: it is in no group.
    stages: StageLinks | None = None
    role_switch: RoleSwitch = field(default_factory=RoleSwitch)
    #: None: no traces.
    tracer: Tracer | None = None
    #: Of the forward passes.
    watch: ForwardWatchdog = field(default_factory=ForwardWatchdog)
    #: Makes the thread of the forward passes.
    open_forward: Callable[[], ForwardThread] = ForwardThread
    #: Computes checksums, in the order of the calls; None: a thread of its own.
    checksum_thread: Executor | None = None
    machine: PrefillMachine = field(init=False)
    replicas: ReplicaSelector = field(init=False)
    caching: PrefixCacheClient = field(init=False)
    conductors: ConductorConnections = field(init=False)
    shell: PrefillShell = field(init=False)
    forward_loop: ForwardLoop = field(init=False)
    _pace: HousekeepingPace = field(default_factory=HousekeepingPace, init=False)
    #: When stage 0 was last told of the shares here.
    _reported_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        engine = self.forward.engine
        settings, block_size = self.settings, engine.layout.block_size
        limits = LongChunkLimits(settings.max_chunk_tokens, settings.max_chunk_s, block_size)
        queue = PrefillQueue(
            chunk_tokens=settings.chunk_tokens,
            max_requests=settings.max_requests,
            long_chunks=LongChunks(limits, self.info.prefill_cost or PrefillCost()),
            order=QUEUE_ORDERS[settings.queue_order],
        )
        rules = PrefillRules(block_size, max_shares=settings.max_shares)
        self.machine = PrefillMachine(rules, queue, self.pages)
        self.replicas = ReplicaSelector(self.kvstores, engine.layout, self.clock)
        self.caching = PrefixCacheClient(
            self.replicas,
            self.transfer,
            self.memory,
            engine.layout,
            self.clock,
            patience_s=settings.kvstore_read_s,
            checksum_thread=self.checksum_thread,
        )
        self.conductors = ConductorConnections(self.port, lambda lost: self.shell.cancel(lost))
        groups = None
        if self.info.stage is not None:
            groups = GroupSteps(
                self.transfer,
                self.memory,
                engine.layout,
                self.conductors,
                self.clock,
                self.info.stage,
                self.info.prefill_cost or PrefillCost(),
                self.forward.activation_bytes,
                settings.kvstore_read_s,
            )
        self.shell = PrefillShell(
            self.machine,
            self.caching,
            self.conductors.owners,
            self.conductors.answer,
            self.clock,
            token_bytes=engine.layout.token_bytes,
            wake_engine=lambda: self.forward_loop.wake(),
            tracer=self.tracer,
            groups=groups,
            transfer=self.transfer,
        )
        self.forward_loop = ForwardLoop(
            self.machine,
            self.jobs,
            self.forward,
            self.watch,
            self.clock,
            self.shell.post,
            self.open_forward,
        )

    @property
    def jobs(self) -> Mapping[RequestId, PrefillJob]:
        """The requests here, by id."""
        return self.shell.jobs

    @property
    def n_conductors(self) -> int:
        """Conductors that are connected to this worker."""
        return len(self.conductors.owners.conductors)

    async def serve(self) -> None:
        """Answer commands and compute until cancelled.

        Raises:
            Unwanted: no conductor wants this worker.
            EngineLost: the engine can't compute any more, in a group of exceptions.
        """
        # After a standstill its landings may be others': nothing is written before that is known.
        self.transfer.allow_writes_while(lambda: self.conductors.is_current(self.clock.now()))
        with closing(self.caching):
            await self._serve()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.shell.open(tasks)
            others = [
                tasks.create_task(self.forward_loop.run()),
                tasks.create_task(self._keep_house()),
            ]
            try:
                await serve_messages(self.port, self._handle)
            finally:
                self.shell.close()
                for task in others:
                    task.cancel()

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Announce that nothing new is taken, and finish what is here within a limit."""
        self.info = info
        await self.conductors.broadcast_info(info)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.shell.idle.wait()

    # -- commands ----------------------------------------------------------------------------

    async def _handle(self, peer: PeerId, message: AnyMessage) -> None:
        if isinstance(message, ToPrefill):
            await self._on_message(peer, message)
        elif isinstance(message, ToFurtherStage):
            await self._on_stage_message(peer, message)
        else:
            drop_unexpected(self.port, message)

    async def _on_message(self, peer: PeerId, message: ToPrefill) -> None:
        match message:
            case StartPrefill():
                if (refusal := self._refusal(peer, message)) is not None:
                    await self.conductors.answer(peer, refusal)
                else:
                    self._on_start(peer, message)
            case Cancel(request_id=request_id):
                await self._on_cancel(peer, request_id)
            case Hello():
                await self.conductors.on_hello(message, peer, self.info)
            case Unwelcome(reason=reason):
                self.conductors.on_unwelcome(peer, reason)
            case ChangeRole():
                greeted = peer in self.conductors.owners.conductors
                self.role_switch.on_change_role(message, self.port, greeted=greeted)
            case _:
                assert_never(message)

    def _refusal(self, peer: PeerId, start: StartPrefill) -> PrefillFailed | None:
        """Return the refusal of a start that is not taken in; None when it is, or was already."""
        job = self.jobs.get(start.request_id)
        if job is not None and job.owner != peer:
            code = error_codes.ID_IN_USE
            reason = f"another connection has a request {start.request_id!r} here"
        elif job is None and self.info.draining:
            code = error_codes.DRAINING
            reason = f"{self.info.worker_id} is stopping: use another one"
        else:
            return None
        return PrefillFailed(request_id=start.request_id, reason=reason, retryable=True, code=code)

    async def _on_cancel(self, peer: PeerId, request_id: RequestId) -> None:
        job = self.jobs.get(request_id)
        if job is None:
            await self.conductors.answer(peer, PrefillStopped(request_id=request_id))
        elif job.owner == peer:
            self.shell.cancel(request_id)
        else:
            record_drop("foreign", self.port.commands, f"Cancel of {request_id} by {peer.hex()}")

    def _on_start(self, peer: PeerId, start: StartPrefill) -> None:
        if start.request_id in self.jobs:
            record_drop("duplicate", self.port.commands, f"StartPrefill of {start.request_id}")
            return
        self._pace.wake()
        now = self.clock.now()
        job = PrefillJob(start, peer, now, now + start.landing_expires_s)
        failure = start_failure(start, self.forward.engine, self.info.worker_id)
        if not start.stages and not self.forward.takes_whole_prompts:
            failure = stage_alone_failure(self.info)
        if not start.stages or failure is not None:
            self.shell.begin(job, failure)
        elif fault := stages_fault(start.stages, self.info):
            failure = PrefillFailure(fault, retryable=True, code=error_codes.INVALID)
            self.shell.begin(job, failure)
        else:
            self._begin_group(job)

    def _begin_group(self, job: PrefillJob) -> None:
        """Take in a prompt as stage 0 of the group."""
        assert self.stages is not None and self.info.stage is not None, "it is in a group"
        job.share = PromptShare(0, self.info.stage.n_stages)
        job.group = GroupPrompt(job.request_id, job.start.stages, self.stages, self.shell.post)
        chunk_tokens = self.info.stage.chunk_tokens
        self.shell.begin(job, None, PrefillRequested(job.start, job.share, chunk_tokens))

    # -- shares of a further stage -----------------------------------------------------------

    async def _on_stage_message(self, peer: PeerId, message: ToFurtherStage) -> None:
        job = self.jobs.get(message.request_id)
        is_own = job is not None and job.owner == peer and job.order is not None
        match message:
            case StartShare() if is_own:
                record_drop("duplicate", self.port.commands, f"StartShare of {message.request_id}")
            case StartShare():
                await self._on_start_share(peer, message)
            case StopShare() if job is None:
                await self.conductors.answer(peer, ShareEnded(request_id=message.request_id))
            case ChunkSent() | SlotFreed() if job is None:
                pass  # the share has just ended, and stage 0 is told so
            case _ if not is_own:
                said = f"{type(message).__name__} of {message.request_id} by {peer.hex()}"
                record_drop("foreign", self.port.commands, said)
            case StopShare(request_id=request_id):
                self.shell.cancel(request_id)
            case ChunkSent(request_id=request_id):
                chunk = ChunkArrived(request_id, message.start, message.stop, message.slot)
                self.shell.post(chunk)
            case SlotFreed(request_id=request_id, slot=slot):
                self.shell.post(NextSlotFreed(request_id, slot))
            case _:
                assert_never(message)

    async def _on_start_share(self, peer: PeerId, order: StartShare) -> None:
        failure = None
        if order.request_id in self.jobs:
            reason = f"another connection has a request {order.request_id!r} here"
            failure = PrefillFailure(reason, retryable=True, code=error_codes.ID_IN_USE)
        elif self.info.draining:
            reason = f"{self.info.worker_id} is stopping: use another one"
            failure = PrefillFailure(
                reason, retryable=True, culprit=self.info.worker_id, code=error_codes.DRAINING
            )
        else:
            forward = self.forward
            failure = share_failure(order, self.info, forward.engine, forward.activation_bytes)
        if failure is not None:
            refused = ShareEnded(
                request_id=order.request_id,
                reason=failure.reason,
                retryable=failure.retryable,
                culprit=failure.culprit,
                invalid=failure.invalid,
                code=failure.code,
            )
            await self.conductors.answer(peer, refused)
            return
        self._pace.wake()
        now = self.clock.now()
        job = PrefillJob(as_start(order), peer, now, now + order.landing_expires_s)
        job.order, job.share = order, PromptShare(order.stage.index, order.stage.n_stages)
        assert self.info.stage is not None, "a share was checked against the record"
        n_next = 0 if order.next_slots is None else len(order.next_slots.offsets)
        requested = PrefillRequested(
            job.start,
            job.share,
            self.info.stage.chunk_tokens,
            n_leased=0 if order.cached is None else len(order.cached.blocks),
            n_next_slots=min(SLOTS_PER_SHARE, n_next),
            has_room=order.room is not None,
        )
        self.shell.begin(job, None, requested)

    async def _report_shares(self) -> None:
        """Tell stage 0 about once a second of each share: a lost one is noticed by that."""
        if self.clock.now() < self._reported_s + _PROGRESS_S:
            return
        self._reported_s = self.clock.now()
        for request_id, job in list(self.jobs.items()):
            request = self.machine.requests.get(request_id)
            if job.order is not None and request is not None:
                n_tokens = request.flow.position
                progress = ShareProgress(request_id=request_id, n_tokens=n_tokens)
                await self.conductors.answer(job.owner, progress)

    # -- housekeeping ------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Publish the load, look for conductors that are gone, and check the engine."""
        while True:
            self.forward.engine.check_alive()
            await self.conductors.probe(self.info, self.clock.now())
            await self._report_shares()
            await self.port.publish(
                PrefillLoad(
                    n_queued=len(self.machine.queue),
                    queued_tokens=self.machine.queue.queued_tokens,
                    free_pages=self.pages.n_free,
                    n_pages=self.pages.n_pages,
                )
            )
            await self._pace.wait(idle=self.shell.idle.is_set())

    def metrics(self) -> MetricSnapshot:
        """Return what the metrics show."""
        return {
            **queue_metrics(len(self.jobs), self.machine.queue),
            **self.shell.counts.metrics(),
            **page_metrics(self.pages),
            **replica_metrics(self.replicas),
        }

    def check(self) -> None:
        """Audit: the machine and its shell agree, and requests alone hold pages."""
        self.shell.check()
        held = sum(len(request.pages) for request in self.machine.requests.values())
        assert held + self.pages.n_free == self.pages.n_pages
