"""The forward passes: one thread that works through the queue, batch after batch."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from halfmoon_engine.interface import GrammarFailed, PendingToken, TokenResult
from halfmoon_prefill.forward_pass import PrefillForward
from halfmoon_prefill.prefill_job import PrefillJob, PrefillRefused
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk, PrefillQueue

log = structlog.get_logger()

#: How long to wait for late tokens at a time when there is nothing else to compute.
_LATE_S = 0.02


class ForwardLoop:
    """Runs what is ready in the queue, and says what came out."""

    def __init__(
        self, queue: PrefillQueue, forward: PrefillForward, watch: ForwardWatchdog
    ) -> None:
        self._queue = queue
        self._forward = forward
        self._watch = watch
        #: The jobs that were admitted and not removed, with their next token to come.
        self._jobs: dict[RequestId, tuple[PrefillJob, asyncio.Future[int]]] = {}
        #: First tokens that are late: what their grammars allow is not known yet.
        self._late: dict[RequestId, PendingToken] = {}
        #: Requests in the forward pass that runs now.
        self._in_forward: frozenset[RequestId] = frozenset()
        self._forward_over = asyncio.Condition()
        self._work = asyncio.Event()

    def admit(self, job: PrefillJob) -> "asyncio.Future[int]":
        """Compute a queued request from now on; its first token, to wait for."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._jobs[job.request_id] = (job, future)
        self._queue.ready(job.request_id)
        self._work.set()
        return future

    async def remove(self, request_id: RequestId) -> None:
        """Compute no more of a request; returns once no forward pass touches its pages."""
        self._queue.remove(request_id)
        async with self._forward_over:
            await self._forward_over.wait_for(lambda: request_id not in self._in_forward)
        self._jobs.pop(request_id, None)
        self._late.pop(request_id, None)

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="forward") as thread:
            while True:
                chunks = self._queue.next_batch()
                late = dict(self._late)
                if not chunks and not late:
                    self._work.clear()
                    await self._work.wait()
                    continue
                batch = [(self._jobs[chunk.request_id][0], chunk) for chunk in chunks]
                self._in_forward = frozenset(chunk.request_id for chunk in chunks)
                try:
                    chosen, finished = await loop.run_in_executor(
                        thread, self._watch.run, self._compute, batch, [*late.values()]
                    )
                except Exception as error:
                    log.exception("forward_failed", n_requests=len(batch))
                    self._give_up([*(chunk.request_id for chunk in chunks), *late], error)
                else:
                    self._queue.advance(chunks)
                    for chunk, each in zip(chunks, chosen, strict=True):
                        if each is not None:
                            self._hand_out(chunk.request_id, each)
                    for request_id, each in zip(late, finished, strict=True):
                        self._hand_out(request_id, each)
                finally:
                    async with self._forward_over:
                        self._in_forward = frozenset()
                        self._forward_over.notify_all()

    def _compute(
        self, batch: Sequence[tuple[PrefillJob, PrefillChunk]], late: Sequence[PendingToken]
    ) -> tuple[list[TokenResult | None], list[TokenResult]]:
        """Run a batch, and choose what was late in earlier ones; in the forward's thread."""
        chosen = self._forward(batch) if batch else []
        wait_s = 0.0 if batch else _LATE_S
        return chosen, self._forward.engine.finish(late, wait_s) if late else []

    def _hand_out(self, request_id: RequestId, chosen: TokenResult) -> None:
        """Give a request its first token, or the reason for none; unless it has gone."""
        _, future = self._jobs.get(request_id, (None, None))
        self._late.pop(request_id, None)
        if future is None or future.done():
            return
        if isinstance(chosen, PendingToken):
            self._late[request_id] = chosen
        elif isinstance(chosen, GrammarFailed):
            over = chosen.invalid
            future.set_exception(PrefillRefused(chosen.reason, retryable=False, invalid=over))
        else:
            future.set_result(chosen)

    def _give_up(self, request_ids: Sequence[RequestId], error: Exception) -> None:
        for request_id in request_ids:
            self._queue.remove(request_id)
            self._late.pop(request_id, None)
            _, future = self._jobs.get(request_id, (None, None))
            if future is not None and not future.done():
                future.set_exception(error)
