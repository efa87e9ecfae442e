"""The way in: what can't be done here is refused, the rest queues for a turn and for pages."""

import asyncio

from halfmoon_engine.interface import Engine
from halfmoon_prefill.prefill_job import PrefillJob, PrefillRefused
from halfmoon_prefill.start_validation import request_fault, start_fault
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.prefill_queue import PrefillQueue, QueueFull


class QueueAdmission:
    """A worker's queue and pool, as requests come into them and leave."""

    def __init__(
        self, worker_id: WorkerId, engine: Engine, queue: PrefillQueue, pages: PageAllocator
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._layout: KvLayout = engine.layout
        self._queue = queue
        self._pages = pages
        #: Requests take pages in the queue's order, each in its turn: a large one is not passed
        #: over for ever.
        self._waiting: set[RequestId] = set()
        #: Set when there are more pages, or another one's turn has come.
        self._changed = asyncio.Event()

    def accept(self, job: PrefillJob) -> None:
        """Take it into the queue, not ready yet, so that it keeps its place.

        Raises:
            Refused: another layout than the landing's, a start that would fail its forward,
                a prompt over the pool, a full queue.
        """
        start = job.start
        try:
            self._layout.require_same(
                start.landing.layout, self._worker_id, start.landing.region.segment
            )
        except LayoutMismatch as error:
            raise PrefillRefused(str(error), retryable=False) from None
        engine = self._engine
        fault = request_fault(start, n_vocab=engine.n_vocab, max_context=engine.max_context)
        if fault:
            raise PrefillRefused(fault, retryable=False, invalid=True)
        if fault := start_fault(start, self._layout):
            raise PrefillRefused(fault, retryable=False)
        needed = self._layout.blocks_for(job.n_tokens)
        if needed > self._pages.n_pages:
            raise PrefillRefused(
                f"{job.n_tokens} tokens need {needed} pages: the pool has {self._pages.n_pages}",
                retryable=False,
            )
        hoped = start.cached.n_blocks * self._layout.block_size if start.cached else 0
        try:
            self._queue.push(
                job.request_id,
                n_tokens=job.n_tokens,
                n_cached=min(hoped, job.max_cached_tokens(self._layout)),
                ready=False,
                priority=start.priority,
            )
        except QueueFull as error:
            raise PrefillRefused(str(error), retryable=True) from None

    async def take_pages(self, job: PrefillJob) -> None:
        """Wait until there are pages for the whole prompt, and take them."""
        needed = self._layout.blocks_for(job.n_tokens)
        self._waiting.add(job.request_id)
        try:
            while self._first() != job.request_id or self._pages.n_free < needed:
                self._changed.clear()
                await self._changed.wait()
            job.pages = self._pages.allocate(needed)
        finally:
            self._waiting.remove(job.request_id)
            self._changed.set()

    def _first(self) -> RequestId | None:
        """Whose turn it is to take pages."""
        return next((one for one in self._queue.in_order() if one in self._waiting), None)

    def give_back(self, job: PrefillJob) -> None:
        """Its pages are free again; nothing touches them any more."""
        self._pages.release(job.pages)
        self._changed.set()
