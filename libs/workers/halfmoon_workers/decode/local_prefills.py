"""Prefill prompts in the landings of a decode worker, in passes between two steps of its batch.

    DecodeBatch   landing │ pages shared with the prompt │ running …
    LocalPrefills          start ─ chunks ─ PrefillDone ─ new blocks kept ─ pages released

The steps of a prompt are those of `PrefillMachine`, performed by `PrefillShell` as at a prefill
worker. Here are the differences. A prompt is computed in its landing's own pages, once its whole
cached prefix is in them. Its passes leave room for a step of the batch. The pages have two
holders, the landing and the prompt. So a landing may be freed at any moment: no other request gets
its pages while a pass or a transfer of the prompt touches them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from halfmoon_engine.interface import Engine
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    Message,
    PrefillCost,
    PrefillStopped,
    StartPrefill,
    WorkerInfo,
)
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.request_owners import RequestOwners
from halfmoon_scheduling.decode.decode_batch import DecodeBatch
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.long_chunks import LongChunkLimits, LongChunks
from halfmoon_scheduling.prefill.part_pacing import PartPacing
from halfmoon_scheduling.prefill.prefill_commands import ending_message
from halfmoon_scheduling.prefill.prefill_events import KeepingStopped, PrefillFailure
from halfmoon_scheduling.prefill.prefill_machine import PrefillMachine, PrefillRules
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_validation import local_prefill_fault
from halfmoon_workers.decode.landing_keys import LandingKeys
from halfmoon_workers.prefill.forward_loop import ForwardLoop
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.prefill_job import PrefillJob
from halfmoon_workers.prefill.prefill_metrics import queue_metrics, replica_metrics
from halfmoon_workers.prefill.prefill_shell import PrefillShell
from halfmoon_workers.prefill.prefill_validation import start_failure
from halfmoon_workers.prefill.prefix_cache_client import PrefixCacheClient
from halfmoon_workers.start.worker_start import WorkerThreads


@dataclass(frozen=True)
class LocalPrefillParts:
    """Hold what a decode worker needs to prefill, besides what it decodes with."""

    transfer: TransferEngine
    memory: PoolMemory
    replicas: ReplicaSelector
    #: None: no traces.
    tracer: Tracer | None = None
    threads: WorkerThreads = field(default_factory=WorkerThreads)


class LocalPrefills:
    """The prompts that one decode worker prefills."""

    def __init__(
        self,
        parts: LocalPrefillParts,
        engine: Engine,
        batch: DecodeBatch,
        landing_keys: LandingKeys,
        pages: PageAllocator,
        conductors: ConductorConnections,
        info: WorkerInfo,
        settings: DecodeSettings,
        clock: Clock,
        watch: ForwardWatchdog,
        wake: Callable[[], None],
    ) -> None:
        """Have no prompts.

        Args:
            parts: for cached and new blocks.
            engine: of the worker; used in the thread that `run_pass` gets.
            batch: has the landings.
            landing_keys: by which landings are named.
            pages: of the batch.
            conductors: own the landings, and are answered.
            info: the worker's record.
            settings: bounds of a prompt, and of its passes.
            clock: of all times.
            watch: is told of each pass.
            wake: called when a pass may be due; must not wait.
        """
        layout = engine.layout
        self._engine, self._batch, self._pages, self._clock = engine, batch, pages, clock
        self._conductors, self._info, self._settings = conductors, info, settings
        self._landing_keys = landing_keys
        block_size = layout.block_size
        most = max(settings.local_prefill_tokens, block_size)
        self._chunks = LongChunks(
            LongChunkLimits(most, settings.local_prefill_step_s, block_size),
            info.prefill_cost or PrefillCost(),
        )
        #: When the next part is due beside a running batch.
        self.pacing = PartPacing(settings.local_prefill_tbt_s)
        self.machine = PrefillMachine(
            PrefillRules(block_size, overlaps_fetch=False, max_pass_prompts=1),
            PrefillQueue(
                chunk_tokens=block_size,
                max_requests=settings.max_running,
                long_chunks=self._chunks,
            ),
            None,
        )
        self._replicas = parts.replicas
        self._caching = PrefixCacheClient(
            self._replicas,
            parts.transfer,
            parts.memory,
            layout,
            clock,
            patience_s=settings.kvstore_read_s,
            checksum_thread=parts.threads.checksums,
        )
        self.shell = PrefillShell(
            self.machine,
            self._caching,
            RequestOwners(),  # the landing's owner is the prompt's
            self._answer,
            clock,
            token_bytes=layout.token_bytes,
            wake_engine=wake,
            tracer=parts.tracer,
            on_ended=lambda job: pages.release(job.pages),
        )
        forward = PrefillForward(
            engine,
            parts.transfer.submit,
            parts.memory.region,
            clock,
            wait_for=parts.threads.wait_for,
        )
        self._loop = ForwardLoop(
            self.machine, self.shell.jobs, forward, watch, clock, self.shell.post
        )

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Prefill from now on, in tasks of this group."""
        self.shell.open(tasks)

    def stop(self) -> None:
        """Begin nothing more: the group of tasks is about to be cancelled."""
        self.shell.close()

    def close(self) -> None:
        """End the threads, after the tasks."""
        self._caching.close()

    def is_computing(self, request_id: RequestId) -> bool:
        """Return whether a prompt is here that `PrefillDone` was not sent for."""
        job = self.shell.jobs.get(request_id)
        return job is not None and not job.done_s

    async def start(self, peer: PeerId, start: StartPrefill) -> None:
        """Prefill a prompt in its landing, or answer why not."""
        request_id = start.request_id
        landing = self._batch.landing_pages(request_id)
        job = self.shell.jobs.get(request_id)
        if job is not None and job.owner == peer and tuple(job.pages) == landing:
            record_drop("duplicate", self._info.commands, f"StartPrefill of {request_id}")
        elif (failure := self._failure(peer, start, landing, job)) is not None:
            refusal = ending_message(request_id, failure)
            assert refusal is not None, "a failure has a message"
            await self._conductors.answer(peer, refusal)
        else:
            self._pages.share(landing)
            now = self._clock.now()
            until_s = now + start.landing_expires_s
            self.shell.begin(
                PrefillJob(start, peer, now, until_s, pages=list(landing), in_place=True), None
            )

    def _failure(
        self,
        peer: PeerId,
        start: StartPrefill,
        landing: tuple[int, ...],
        job: PrefillJob | None,
    ) -> PrefillFailure | None:
        if not landing or self._conductors.owners.owner_of(start.request_id) != peer:
            reason = "no landing is held for it on this connection"
            return PrefillFailure(reason, retryable=True, code=error_codes.NOT_HELD)
        if job is not None:
            reason = f"an earlier request {start.request_id!r} is still ending here"
            return PrefillFailure(reason, retryable=True, code=error_codes.ID_IN_USE)
        if (failure := start_failure(start, self._engine, self._info.worker_id)) is not None:
            return failure
        n_landed = self._batch.n_landed(start.request_id)
        assert n_landed is not None, "a landing with pages has tokens"
        return local_prefill_fault(
            start,
            region=self._landing_keys.region_of(start.request_id),
            pages=landing,
            n_landed=n_landed,
            n_held_blocks=self._batch.held_blocks(start.request_id),
            block_size=self._engine.layout.block_size,
            max_tokens=self._settings.local_prefill_tokens,
        )

    def cancel(self, request_id: RequestId) -> None:
        """Give up a prompt that is not done; what is done is kept for reuse all the same."""
        if self.is_computing(request_id):
            self.shell.cancel(request_id)

    def give_way(self) -> None:
        """Give up blocks that no kvstore has yet, of prompts whose pages nothing else holds.

        Their pages are wanted. They are free once no transfer reads them.
        """
        for job in list(self.shell.jobs.values()):
            if any(self._pages.n_holders(page) == 1 for page in job.pages):
                self.shell.post(KeepingStopped(job.request_id))

    @property
    def reclaimable_pages(self) -> int:
        """Pages of prompts that are done, which `give_way` would free soon."""
        done = (job for job in self.shell.jobs.values() if job.done_s)
        return sum(self._pages.n_holders(page) == 1 for job in done for page in job.pages)

    async def run_pass(self, thread: ForwardThread, step_s: float) -> bool:
        """Run the pass that is due, if there is one; return whether there was.

        Beside a batch, none is due before its steps have made up for earlier ones.

        Args:
            thread: computes the batch's steps, too.
            step_s: predicted seconds of the batch's next step; 0: it has none.

        Raises:
            EngineLost: no pass can be computed any more.
        """
        self._chunks.reserved_s = step_s
        if not step_s:
            self.pacing.on_idle()
            return await self._loop.run_next(thread)
        if not self.pacing.is_due:
            return False
        began_s = self._clock.now()
        ran = await self._loop.run_next(thread, delayed_wait_s=0.0)
        if ran:
            self.pacing.on_part(self._clock.now() - began_s)
        return ran

    async def _answer(self, peer: PeerId, message: Message) -> None:
        """Send a conductor a message; a decode worker does not answer a cancellation."""
        if not isinstance(message, PrefillStopped):
            await self._conductors.answer(peer, message)

    @property
    def held_pages(self) -> list[int]:
        """Pages of the prompts here."""
        return [page for job in self.shell.jobs.values() for page in job.pages]

    def metrics(self) -> MetricSnapshot:
        """Return the metrics of a prefill worker, its pages excluded."""
        return {
            **queue_metrics(len(self.shell.jobs), self.machine.queue),
            **self.shell.counts.metrics(),
            **replica_metrics(self._replicas),
        }

    def check(self) -> None:
        """Audit: machine and shell agree."""
        self.shell.check()
