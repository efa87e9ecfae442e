"""Keep the blocks that decode completes, for the conversation's next turn.

Their pages are found here until their memory is wanted. Their bytes are put into a kvstore:

    step ──▶ block complete ──▶ waiting ──▶ being put ──▶ kept
                                   │            ├──▶ failed
                                   └────────────┴──▶ dropped: its page is wanted, or too many wait

No step waits for any of it. A complete block is never written again. Its page has a second holder
while the block waits or is being put. So the page is given to no other request meanwhile, even when
its own request ends. A block is found only through the block before it. So once a block is lost,
later blocks of that answer are dropped.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from halfmoon_prefix_cache.block_put import BlockPutter, BlockRun
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import AnswerChain, StartDecode
from halfmoon_runtime.kvstore_clients import KvstoreUnavailable
from halfmoon_runtime.observability.metrics import MetricSnapshot, by_label
from halfmoon_scheduling.decode.answer_blocks import AnswerBlock, AnswerBlocks
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer.interface import Transfer, TransferError

log = structlog.get_logger()

#: Blocks that wait at the most, of all requests together.
MAX_WAITING_BLOCKS = 256
#: Blocks of one answer that are put together at the most.
_RUN_BLOCKS = 16
#: Answers of which blocks are put at the same time.
_MAX_PUTS = 4
#: Seconds after which a put is given up: a kvstore that hangs holds pages no longer.
_PUT_LIMIT_S = 5.0


@dataclass(eq=False, slots=True)
class _Answer:
    """One request that runs, or that has ended with blocks to put."""

    request_id: RequestId
    chain: AnswerChain
    blocks: AnswerBlocks
    #: Complete blocks in their order, and the page of each.
    waiting: list[tuple[AnswerBlock, int]] = field(default_factory=list)
    is_being_put: bool = False
    #: Whether one of its blocks was lost.
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class _Put:
    """A put under way."""

    #: Pages that it reads, each of which it holds.
    pages: list[int]
    #: Its write, once there is one.
    writes: list[Transfer] = field(default_factory=list)


class AnswerKeeper:
    """Keep the answers of one decode worker's requests."""

    def __init__(
        self,
        pages: PageAllocator,
        page_of: Callable[[RequestId, int], int],
        *,
        block_size: int,
        putter: BlockPutter | None,
        keeps_pages: bool,
    ) -> None:
        """Keep nothing yet; blocks are put while `run` runs.

        Args:
            pages: of the worker.
            page_of: returns the page of a running request's block, by its index.
            block_size: tokens of a page.
            putter: puts blocks; None: nothing is kept.
            keeps_pages: whether the pages of complete blocks are kept here, too.
        """
        self._keeps_pages = keeps_pages
        self._pages = pages
        self._page_of = page_of
        self._block_size = block_size
        self._putter = putter
        self._running: dict[RequestId, _Answer] = {}
        #: Answers with blocks that wait, the next one to put first.
        self._waiting: dict[_Answer, None] = {}
        self._n_waiting = 0
        self._puts: dict[asyncio.Task[int], _Put] = {}
        #: Parent of all puts; None while the worker does not serve.
        self._tasks: asyncio.TaskGroup | None = None
        #: Set while no block waits or is being put.
        self._idle = asyncio.Event()
        self._idle.set()
        self._n_blocks = {"kept": 0, "dropped": 0, "failed": 0}

    # -- calls of the worker; none of them waits ---------------------------------------------

    def start(self, start: StartDecode, n_landed: int) -> None:
        """Follow a request from its first token on, if its answer is to be kept."""
        if (chain := start.answer_chain) is None or self._putter is None:
            return
        blocks = AnswerBlocks(
            chain.parent,
            chain.tail,
            start.first_token,
            n_landed=n_landed,
            block_size=self._block_size,
        )
        self._running[start.request_id] = _Answer(start.request_id, chain, blocks)

    def on_token(self, request_id: RequestId, token: int) -> None:
        """Take a request's next token, while the request still has its pages."""
        answer = self._running.get(request_id)
        if answer is None or (block := answer.blocks.on_token(token)) is None:
            return
        page = self._page_of(request_id, block.index)
        if self._keeps_pages:
            self._pages.keep(page, block.hash)
        if answer.is_cut or self._n_waiting >= MAX_WAITING_BLOCKS:
            answer.is_cut = True
            self._n_blocks["dropped"] += 1
            return
        self._pages.share([page])
        answer.waiting.append((block, page))
        self._waiting.setdefault(answer)
        self._n_waiting += 1
        self._idle.clear()
        self._begin_puts()

    def end(self, request_id: RequestId) -> None:
        """Follow a request no longer; its complete blocks are still put."""
        self._running.pop(request_id, None)

    def give_way(self) -> None:
        """Drop blocks that wait, and stop writes of pages that nothing else holds.

        Their pages are wanted. Those of a stopped write are free once it has ended.
        """
        for answer in list(self._waiting):
            self._drop(answer)
        for put in self._puts.values():
            if any(self._pages.n_holders(page) == 1 for page in put.pages):
                for write in put.writes:
                    write.cancel()
        self._note_idle()

    @property
    def reclaimable_pages(self) -> int:
        """Pages that `give_way` would free at once."""
        held = (page for answer in self._waiting for _, page in answer.waiting)
        return sum(self._pages.n_holders(page) == 1 for page in held)

    def metrics(self) -> MetricSnapshot:
        """Return counts of blocks and the number of those on their way."""
        n_putting = sum(len(put.pages) for put in self._puts.values())
        return {
            "halfmoon_decode_answer_blocks_total": (
                "Blocks completed by decode: kept at a kvstore, dropped since too many waited or"
                " their pages were wanted, or failed to be put.",
                by_label("result", self._n_blocks),
            ),
            "halfmoon_decode_pending_answer_blocks": (
                "Blocks completed by decode that wait for a kvstore, or are being put.",
                by_label("state", {"waiting": self._n_waiting, "putting": n_putting}),
            ),
        }

    # -- puts --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Put blocks until cancelled; then stop the puts under way."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._begin_puts()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    @property
    def is_idle(self) -> bool:
        """Return whether no block waits or is being put."""
        return self._idle.is_set()

    async def wait_until_idle(self) -> None:
        """Wait until no block waits or is being put."""
        await self._idle.wait()

    def _begin_puts(self) -> None:
        """Begin as many puts as may run at the same time, one for each answer."""
        while self._tasks is not None and len(self._puts) < _MAX_PUTS:
            answer = next((each for each in self._waiting if not each.is_being_put), None)
            if answer is None:
                return
            taken, answer.waiting = answer.waiting[:_RUN_BLOCKS], answer.waiting[_RUN_BLOCKS:]
            del self._waiting[answer]
            if answer.waiting:
                self._waiting[answer] = None
            self._n_waiting -= len(taken)
            answer.is_being_put = True
            put = _Put([page for _, page in taken])
            task = self._tasks.create_task(
                self._run_put(answer, [block for block, _ in taken], put),
                name=f"answer of {answer.request_id}",
            )
            self._puts[task] = put
            task.add_done_callback(partial(self._on_put_ended, answer))

    async def _run_put(self, answer: _Answer, blocks: Sequence[AnswerBlock], put: _Put) -> int:
        """Put these blocks; return how many of them the kvstore does not have."""
        assert self._putter is not None, "without it, no request is followed"
        run = BlockRun(
            tuple(block.hash for block in blocks),
            blocks[0].parent,
            tuple(token for block in blocks for token in block.token_ids),
            answer.chain.tenant,
        )
        try:
            return await self._putter.put(
                answer.chain.store_in, run, put.pages, _PUT_LIMIT_S, put.writes
            )
        except (TransferError, KvstoreUnavailable) as error:
            log.info("answer_not_kept", request_id=answer.request_id, reason=str(error))
        except Exception:  # whatever it is, it costs this answer's blocks alone
            log.exception("answer_not_kept", request_id=answer.request_id)
        return len(blocks)

    def _on_put_ended(self, answer: _Answer, task: "asyncio.Task[int]") -> None:
        """Let go of a put's pages; nothing reads them any more."""
        pages = self._puts.pop(task).pages
        self._pages.release(pages)
        answer.is_being_put = False
        n_lost = len(pages) if task.cancelled() else task.result()
        self._n_blocks["kept"] += len(pages) - n_lost
        self._n_blocks["failed"] += n_lost
        if n_lost:
            self._drop(answer)
        self._begin_puts()
        self._note_idle()

    def _drop(self, answer: _Answer) -> None:
        """Drop the blocks of an answer that wait, and those that are yet to come."""
        answer.is_cut = True
        self._waiting.pop(answer, None)
        self._pages.release(page for _, page in answer.waiting)
        self._n_waiting -= len(answer.waiting)
        self._n_blocks["dropped"] += len(answer.waiting)
        answer.waiting.clear()

    def _note_idle(self) -> None:
        if not self._n_waiting and not self._puts:
            self._idle.set()

    @property
    def held_pages(self) -> list[int]:
        """Pages of blocks that wait or are being put, each once for every hold."""
        waiting = [page for answer in self._waiting for _, page in answer.waiting]
        return [*waiting, *(page for put in self._puts.values() for page in put.pages)]

    def check(self) -> None:
        """Audit: the queue is bounded, and no answer has two puts."""
        assert self._n_waiting == sum(len(answer.waiting) for answer in self._waiting)
        assert self._n_waiting <= MAX_WAITING_BLOCKS and len(self._puts) <= _MAX_PUTS
        assert all(answer.waiting and not answer.is_cut for answer in self._waiting)
        assert all(not each.waiting or each in self._waiting for each in self._running.values())
        assert self._idle.is_set() == (not self.held_pages)
