"""The forward passes: one thread that works through the queue, batch after batch."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from halfmoon_engine.interface import NOT_FOLLOWED
from halfmoon_prefill.forward import PrefillForward
from halfmoon_prefill.job import Job, Refused
from halfmoon_protocol.ids import RequestId
from halfmoon_scheduling.prefill_queue import Chunk, PrefillQueue

log = structlog.get_logger()


class Computing:
    """Runs what is ready in the queue, and says what came out."""

    def __init__(self, queue: PrefillQueue, forward: PrefillForward) -> None:
        self._queue = queue
        self._forward = forward
        #: The jobs that were admitted and not removed, with their next token to come.
        self._jobs: dict[RequestId, tuple[Job, asyncio.Future[int]]] = {}
        #: Requests in the forward pass that runs now.
        self._in_forward: frozenset[RequestId] = frozenset()
        self._forward_over = asyncio.Condition()
        self._work = asyncio.Event()

    def admit(self, job: Job) -> "asyncio.Future[int]":
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

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="forward") as thread:
            while True:
                chunks = self._queue.next_batch()
                if not chunks:
                    self._work.clear()
                    await self._work.wait()
                    continue
                batch = [(self._jobs[chunk.request_id][0], chunk) for chunk in chunks]
                self._in_forward = frozenset(chunk.request_id for chunk in chunks)
                try:
                    tokens = await loop.run_in_executor(thread, self._forward, batch)
                except Exception as error:
                    log.exception("forward_failed", n_requests=len(batch))
                    self._give_up(chunks, error)
                else:
                    self._queue.advance(chunks)
                    self._hand_out(chunks, tokens)
                finally:
                    async with self._forward_over:
                        self._in_forward = frozenset()
                        self._forward_over.notify_all()

    def _hand_out(self, chunks: Sequence[Chunk], tokens: Sequence[int | None]) -> None:
        for chunk, token in zip(chunks, tokens, strict=True):
            future = self._jobs[chunk.request_id][1]
            if future.done():
                continue
            if token is not None:
                future.set_result(token)
            elif chunk.last:
                future.set_exception(Refused(NOT_FOLLOWED, retryable=False))

    def _give_up(self, chunks: Sequence[Chunk], error: Exception) -> None:
        for chunk in chunks:
            self._queue.remove(chunk.request_id)
            future = self._jobs[chunk.request_id][1]
            if not future.done():
                future.set_exception(error)
