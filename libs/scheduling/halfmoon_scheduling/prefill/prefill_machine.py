"""Decide what a prefill worker does next: events and the time in, commands out.

    PrefillRequested
          │  queue full, prompt over the pool ─▶ EndRequest
          ▼
       WAITING ──pages, in the queue's order──▶ LEASING ─▶ (RESERVING) ─▶ (FETCHING) ──▶ COMPUTING
                                              FetchPrefix  ReserveRoom  prefix not here     │
                                                                            next_pass, PassEnded
                                                                                            ▼
       gone ◀── RELEASING ◀── KEEPING ◀── REPORTING ◀── SETTLING ◀──────first token── (CHOOSING)
     EndRequest ReleaseHoldings KeepBlocks ReportDone  SettleTransfers            TokenDelayed
                    ▲
                    └── STOPPING ◀── PrefillCancelled or a failure, from any phase before
                        until the pass under way is over; skipped if the request is not in it

The machine owns the queue, the pages and each request's phase. The shell owns the engine, the
transfers, the leases and the reservations: it performs the commands and posts their outcomes. Two
shells exist: `services/prefill`, and the simulator's workers.

- A request's pages are free again only after `HoldingsReleased`, and that is asked for only while
  no pass touches them. So nothing writes to its pages or its landing after `EndRequest`.
- Room at the home kvstore is reserved while the prefix is leased, for the blocks that the home
  lacks if the conductor's directory is right. If it was wrong, or nothing is cached, `ReserveRoom`
  follows.
- The engine is asked for, never pushed: `WakeEngine` says that a pass may be due, and the shell
  calls `next_pass` when its engine is free. A decode worker that prefills calls it between two of
  its steps.
- Commands are performed in their order. A shell whose commands end at once posts their outcomes
  before it performs the next command.

What differs from worker to worker is in `PrefillRules`. A worker with a pool of its own begins a
pass while cached blocks are still on their way, layer by layer. A decode worker computes in the
landing itself (no pages), behind the blocks that it has, with the whole prefix there, one prompt a
step. What differs from
request to request is in its `PromptShare`: all layers, or those of one stage of a group.

A prompt of a group is a request at each stage. At stage 0 it takes the way above, with
`STARTING` before `COMPUTING`: `StartStages` begins the shares at the other stages. A further stage
neither leases nor reserves: stage 0 has done so for all. Each chunk is computed in a pass of its
own. `ChunkFlow` has the chunks that arrived and the slots for the next stage. At stage 0
`SettleTransfers` ends when the KV of all stages is in the landing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import KvstoreAddress, StartPrefill
from halfmoon_scheduling.decode.decode_batch import finish_reason
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prefill.chunk_flow import ArrivedChunk, BadChunk, ChunkFlow
from halfmoon_scheduling.prefill.prefill_commands import (
    EndRequest,
    FetchPrefix,
    FreeSlot,
    KeepBlocks,
    PrefillCommand,
    PrefillEnding,
    PrefillPass,
    PrefillStop,
    ReleaseHoldings,
    ReportDone,
    ReserveRoom,
    SendChunk,
    SettleTransfers,
    StagePass,
    StartStages,
    WakeEngine,
)
from halfmoon_scheduling.prefill.prefill_events import (
    BlocksKept,
    ChunkArrived,
    DoneReported,
    FirstToken,
    HoldingsReleased,
    KeepingStopped,
    NextSlotFreed,
    PagesFreed,
    PassEnded,
    PassFailed,
    PrefillCancelled,
    PrefillEvent,
    PrefillFailure,
    PrefillRequested,
    PrefixFetched,
    PrefixLeased,
    RoomRefused,
    RoomReserved,
    StagesStarted,
    StepFailed,
    TokenDelayed,
    TransfersSettled,
)
from halfmoon_scheduling.prefill.prefill_queue import PrefillChunk, PrefillQueue, QueueFull
from halfmoon_scheduling.prefill.prefill_request import (
    QUEUED_PHASES,
    PrefillPhase,
    PrefillRequest,
)


@dataclass(frozen=True, slots=True)
class PrefillRules:
    """The differences between kinds of prefill workers."""

    block_size: int
    #: Whether a pass may begin before the cached prefix is here (layer-wise loading).
    overlaps_fetch: bool = True
    #: Prompts of one pass at the most; None: as many as the queue packs into it.
    max_pass_prompts: int | None = None
    #: Prompts of the worker's group that hold pages and slots here at a time.
    max_shares: int = 2


class PrefillMachine:
    """All requests of one prefill worker."""

    def __init__(
        self, rules: PrefillRules, queue: PrefillQueue, pages: PageAllocator | None
    ) -> None:
        """Create a machine without requests.

        Args:
            rules: of this kind of worker.
            queue: empty; changed by the machine alone from now on.
            pages: of the worker's pool; None: prompts are computed in their landings.
        """
        self.queue = queue
        self.pages = pages
        #: Everything from `PrefillRequested` to `EndRequest`, in order of arrival.
        self.requests: dict[RequestId, PrefillRequest] = {}
        self._rules = rules
        #: Requests without pages: exactly those in `WAITING`.
        self._waiting: set[RequestId] = set()
        #: Requests whose first token is delayed: exactly those in `CHOOSING`.
        self._choosing: dict[RequestId, None] = {}
        self._pass: PrefillPass | None = None
        #: Requests with a chunk in `_pass`.
        self._in_pass: frozenset[RequestId] = frozenset()

    def handle(self, event: PrefillEvent, now: float) -> list[PrefillCommand]:
        """Take one event and return what follows from it.

        Args:
            event: what happened.
            now: seconds on a clock that never goes back.
        """
        match event:
            case PrefillRequested():
                return self._on_requested(event, now)
            case PrefillCancelled(request_id=request_id):
                return self._end(self.requests.get(request_id), PrefillStop())
            case PrefixLeased():
                return self._on_leased(event, now)
            case PrefixFetched(request_id=request_id):
                return self._on_fetched(request_id)
            case RoomReserved(request_id=request_id):
                return self._on_room(request_id, now, has_room=True)
            case RoomRefused(request_id=request_id):
                return self._on_room(request_id, now, has_room=False)
            case StagesStarted():
                return self._on_stages_started(event, now)
            case ChunkArrived():
                return self._on_chunk_arrived(event)
            case NextSlotFreed():
                return self._on_next_slot_freed(event)
            case PassEnded():
                return self._on_pass_ended(event, now)
            case PassFailed(reason=reason):
                return self._on_pass_failed(reason)
            case TransfersSettled():
                return self._on_settled(event, now)
            case DoneReported(request_id=request_id):
                return self._on_reported(request_id)
            case BlocksKept(request_id=request_id):
                return self._on_kept(request_id)
            case KeepingStopped(request_id=request_id):
                return self._on_keeping_stopped(request_id)
            case StepFailed(request_id=request_id, failure=failure):
                return self._end(self.requests.get(request_id), failure)
            case HoldingsReleased(request_id=request_id):
                return self._on_released(request_id, now)
            case PagesFreed():
                return self._give_pages(now)
            case _:
                assert_never(event)

    def next_pass(self, now: float) -> PrefillPass | None:
        """Return the forward pass to run now; None while one is under way or none is due."""
        if self._pass is not None:
            return None
        chunks = tuple(self.queue.next_batch()[: self._rules.max_pass_prompts])
        if not chunks and not self._choosing:
            return None
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            if request.computing_since_s is None:
                request.computing_since_s = now
        self._pass = PrefillPass(chunks, tuple(self._choosing), self._stage_pass(chunks))
        self._in_pass = frozenset(chunk.request_id for chunk in chunks)
        return self._pass

    def _stage_pass(self, chunks: Sequence[PrefillChunk]) -> StagePass | None:
        """Begin the chunk of a share, which is alone in its pass; None: whole prompts."""
        if not chunks or (request := self.requests[chunks[0].request_id]).share.is_whole:
            return None
        return StagePass(request.share, *request.flow.take())

    # -- the way in --------------------------------------------------------------------------

    def _on_requested(self, event: PrefillRequested, now: float) -> list[PrefillCommand]:
        start, share = event.start, event.share
        assert start.request_id not in self.requests, f"{start.request_id!r} is here already"
        request = PrefillRequest(start, len(start.token_ids), now, share, event.n_leased)
        if self.pages is None:
            request.n_held_blocks = start.n_held_blocks
        if not share.is_whole:
            request.has_room = event.has_room
            request.flow = ChunkFlow(share, request.n_tokens, event.chunk_tokens)
            request.flow.begin(event.n_leased * self._rules.block_size)
            request.flow.open_next(event.n_next_slots, event.chunk_tokens)
        needed = self._pages_for(request)
        if self.pages is not None and needed > self.pages.n_pages:
            reason = (
                f"{request.n_tokens} tokens need {needed} pages: the pool has {self.pages.n_pages}"
            )
            failure = PrefillFailure(reason, retryable=False, code=error_codes.TOO_LONG)
            return [EndRequest(start.request_id, failure)]
        block_size = self._rules.block_size
        try:
            self.queue.push(
                start.request_id,
                n_tokens=request.n_tokens,
                n_cached=request.max_cached_blocks(block_size) * block_size,
                ready=False,
                priority=start.priority,
                # The scores of a chunk need its logits over the whole vocabulary at once.
                may_be_long=start.sampling.prompt_logprobs is None,
                arrived_s=now,
                deadline_s=None if start.deadline_s is None else now + start.deadline_s,
                is_share=not share.is_whole,
                tenant=start.tenant,
            )
        except QueueFull as error:
            failure = PrefillFailure(str(error), retryable=True, code=error_codes.NO_ROOM)
            return [EndRequest(start.request_id, failure)]
        self.requests[start.request_id] = request
        self._waiting.add(start.request_id)
        return self._give_pages(now)

    def _give_pages(self, now: float) -> list[PrefillCommand]:
        """Give pages in the queue's order: a large prompt is not passed over for ever."""
        commands: list[PrefillCommand] = []
        while self._waiting:
            first = next(one for one in self.queue.in_order() if one in self._waiting)
            request = self.requests[first]
            if not request.share.is_whole and self._n_shares() >= self._rules.max_shares:
                break
            if self.pages is not None:
                needed = self._pages_for(request)
                if needed > self.pages.n_free:
                    break
                request.pages = self.pages.allocate(needed)
            self._waiting.remove(first)
            request.phase, request.paged_s = PrefillPhase.LEASING, now
            n_blocks = request.max_cached_blocks(self._rules.block_size)
            request.reserved_from = _expected_new_block(request.start, n_blocks)
            pages = tuple(request.pages)
            commands.append(FetchPrefix(first, pages, n_blocks, request.reserved_from))
        return commands

    def _n_shares(self) -> int:
        """Count the requests that hold memory for activations."""
        return sum(
            not request.share.is_whole and bool(request.pages) for request in self.requests.values()
        )

    def _pages_for(self, request: PrefillRequest) -> int:
        return -(-request.n_tokens // self._rules.block_size)

    def _on_leased(self, event: PrefixLeased, now: float) -> list[PrefillCommand]:
        request = self._in(event.request_id, PrefillPhase.LEASING)
        if request is None:
            return []
        request.n_cached = event.n_blocks * self._rules.block_size
        request.prefix_fetched = event.n_blocks == request.n_held_blocks
        self.queue.rebase(event.request_id, request.n_cached)
        if not request.share.is_whole:
            request.flow.begin(request.n_cached)
        if not request.share.is_first:
            return self._prepared(request, now)
        first = _first_new_block(request.start, event.source, event.n_blocks)
        if event.has_room is not None and request.reserved_from is not None:
            request.has_room = event.has_room
            if first >= request.reserved_from:
                return self._prepared(request, now)
        if request.start.store_in is not None and request.start.block_hashes[first:]:
            request.phase = PrefillPhase.RESERVING
            return [ReserveRoom(event.request_id, first)]
        return self._prepared(request, now)

    def _on_room(
        self, request_id: RequestId, now: float, *, has_room: bool
    ) -> list[PrefillCommand]:
        request = self._in(request_id, PrefillPhase.RESERVING)
        if request is None:
            return []
        request.has_room = has_room
        return self._prepared(request, now)

    def _prepared(self, request: PrefillRequest, now: float) -> list[PrefillCommand]:
        """Let a request be computed, unless its prefix must be here before."""
        request.asking_s = now - request.paged_s
        if request.share.is_first and not request.share.is_whole:
            request.phase = PrefillPhase.STARTING
            return [StartStages(request.request_id)]
        return self._compute_with_prefix(request)

    def _on_stages_started(self, event: StagesStarted, now: float) -> list[PrefillCommand]:
        request = self._in(event.request_id, PrefillPhase.STARTING)
        if request is None:
            return []
        request.asking_s = now - request.paged_s
        request.flow.open_next(event.n_slots, event.chunk_tokens)
        return self._compute_with_prefix(request)

    def _compute_with_prefix(self, request: PrefillRequest) -> list[PrefillCommand]:
        if not request.prefix_fetched and not self._rules.overlaps_fetch:
            request.phase = PrefillPhase.FETCHING
            return []
        return self._compute(request)

    def _on_fetched(self, request_id: RequestId) -> list[PrefillCommand]:
        request = self.requests.get(request_id)
        if request is None:
            return []
        request.prefix_fetched = True
        return self._compute(request) if request.phase is PrefillPhase.FETCHING else []

    # -- computing ---------------------------------------------------------------------------

    def _compute(self, request: PrefillRequest) -> list[PrefillCommand]:
        request.phase = PrefillPhase.COMPUTING
        self.queue.ready(request.request_id)
        self._allow(request)
        return [WakeEngine()]

    def _allow(self, request: PrefillRequest) -> None:
        """Let the queue compute the next chunk of a share, if it is here and has where to go."""
        if not request.share.is_whole:
            self.queue.allow(request.request_id, request.flow.allowed)

    def _on_chunk_arrived(self, event: ChunkArrived) -> list[PrefillCommand]:
        request = self._flowing(event.request_id)
        if request is None:
            return []
        try:
            request.flow.on_arrived(ArrivedChunk(event.start, event.stop, event.slot))
        except BadChunk as error:
            failure = PrefillFailure(str(error), retryable=True, code=error_codes.INVALID)
            return self._end(request, failure)
        self._allow(request)
        return [WakeEngine()]

    def _on_next_slot_freed(self, event: NextSlotFreed) -> list[PrefillCommand]:
        request = self._flowing(event.request_id)
        if request is None:
            return []
        try:
            request.flow.on_next_freed(event.slot)
        except BadChunk as error:
            failure = PrefillFailure(str(error), retryable=True, code=error_codes.INVALID)
            return self._end(request, failure)
        self._allow(request)
        return [WakeEngine()]

    def _flowing(self, request_id: RequestId) -> PrefillRequest | None:
        """Return a share that has not begun to end; None if there is none."""
        request = self.requests.get(request_id)
        if request is None or request.share.is_whole:
            return None
        ending = request.phase in (PrefillPhase.STOPPING, PrefillPhase.RELEASING)
        return None if ending else request

    def _on_pass_ended(self, event: PassEnded, now: float) -> list[PrefillCommand]:
        ended = self._end_pass()
        self.queue.advance(ended.chunks)
        if ended.stage is None:
            self.queue.observe_pass(ended.chunks, event.compute_s - event.layers_wait_s)
        commands: list[PrefillCommand] = []
        for chunk in ended.chunks:
            request = self.requests[chunk.request_id]
            request.compute_s += event.compute_s
            request.layers_wait_s += event.layers_wait_s
            if request.phase is PrefillPhase.STOPPING:
                commands += self._release(request)
                continue
            if not request.share.is_whole:
                commands += self._on_chunk_computed(request, chunk)
            if chunk.last and request.share.is_last:
                commands += self._on_token(request, event.tokens[chunk.request_id], now)
            elif chunk.last:
                commands += self._settle(request, None, now)
        for request_id in ended.delayed:
            if request_id in self._choosing:  # not cancelled meanwhile
                del self._choosing[request_id]
                token = event.tokens[request_id]
                commands += self._on_token(self.requests[request_id], token, now)
        commands.append(WakeEngine())
        return commands

    def _on_chunk_computed(
        self, request: PrefillRequest, chunk: PrefillChunk
    ) -> list[PrefillCommand]:
        """Hand a chunk's activations on, and give its slot here back."""
        incoming, outgoing = request.flow.end(chunk.stop)
        commands: list[PrefillCommand] = []
        if outgoing is not None:
            commands.append(SendChunk(request.request_id, chunk.start, chunk.stop, outgoing))
        if incoming is not None:
            commands.append(FreeSlot(request.request_id, incoming))
        self._allow(request)
        return commands

    def _on_token(
        self, request: PrefillRequest, token: FirstToken, now: float
    ) -> list[PrefillCommand]:
        """Go on with a request whose chunks are all computed."""
        match token:
            case TokenDelayed():
                request.phase = PrefillPhase.CHOOSING
                self._choosing[request.request_id] = None
                return []
            case PrefillFailure():
                return self._end(request, token)
            case int():
                return self._settle(request, token, now)
            case _:
                assert_never(token)

    def _settle(
        self, request: PrefillRequest, token: int | None, now: float
    ) -> list[PrefillCommand]:
        request.phase = PrefillPhase.SETTLING
        request.first_token, request.computed_s = token, now
        return [SettleTransfers(request.request_id)]

    def _on_pass_failed(self, reason: str) -> list[PrefillCommand]:
        failed = self._end_pass()
        failure = PrefillFailure(reason, retryable=True, code=error_codes.INTERNAL_ERROR)
        commands: list[PrefillCommand] = []
        for request_id in (*(chunk.request_id for chunk in failed.chunks), *failed.delayed):
            request = self.requests.get(request_id)
            if request is not None and request.phase is PrefillPhase.STOPPING:
                commands += self._release(request)
            else:
                commands += self._end(request, failure)
        commands.append(WakeEngine())
        return commands

    def _end_pass(self) -> PrefillPass:
        ended = self._pass
        assert ended is not None, "a pass ended that was not begun"
        self._pass, self._in_pass = None, frozenset()
        return ended

    # -- the way out -------------------------------------------------------------------------

    def _on_settled(self, event: TransfersSettled, now: float) -> list[PrefillCommand]:
        request_id = event.request_id
        request = self._in(request_id, PrefillPhase.SETTLING)
        if request is None:
            return []
        token, since_s = request.first_token, request.computing_since_s
        if token is None:
            token = event.first_token
        assert since_s is not None, "settled before it was computed"
        assert token is not None or not request.share.is_first, "settled without a first token"
        request.phase, request.settled_s = PrefillPhase.REPORTING, now
        stopping, n_new = request.start.stopping, 1  # tokens of this try
        return [
            ReportDone(
                request_id,
                first_token=token,
                finish="" if token is None else finish_reason(stopping, n_new, token),
                n_cached=request.n_cached,
                queue_s=since_s - request.arrived_s,
                compute_s=request.compute_s,
                drain_s=now - request.computed_s,
                times=request.times(now),
            )
        ]

    def _on_reported(self, request_id: RequestId) -> list[PrefillCommand]:
        request = self._in(request_id, PrefillPhase.REPORTING)
        if request is None:
            return []
        if not request.has_room:
            return self._release(request)
        request.phase = PrefillPhase.KEEPING
        return [KeepBlocks(request_id)]

    def _on_kept(self, request_id: RequestId) -> list[PrefillCommand]:
        request = self._in(request_id, PrefillPhase.KEEPING)
        return [] if request is None else self._release(request)

    def _on_keeping_stopped(self, request_id: RequestId) -> list[PrefillCommand]:
        request = self.requests.get(request_id)
        if request is None or request.phase is not PrefillPhase.KEEPING:
            return []
        return self._release(request)

    def _end(self, request: PrefillRequest | None, ending: PrefillEnding) -> list[PrefillCommand]:
        """Begin to end a request, unless it has begun to already."""
        if request is None:
            return []
        if request.phase in (PrefillPhase.STOPPING, PrefillPhase.RELEASING):
            if request.ending is None and isinstance(ending, PrefillStop):
                request.ending = ending  # it is done, and a cancellation is still answered
            return []
        request.ending = ending
        self.queue.remove(request.request_id)
        self._waiting.discard(request.request_id)
        self._choosing.pop(request.request_id, None)
        if request.request_id in self._in_pass:
            request.phase = PrefillPhase.STOPPING
            return []
        return self._release(request)

    def _release(self, request: PrefillRequest) -> list[PrefillCommand]:
        assert request.request_id not in self._in_pass, "released under a pass"
        request.phase = PrefillPhase.RELEASING
        return [ReleaseHoldings(request.request_id)]

    def _on_released(self, request_id: RequestId, now: float) -> list[PrefillCommand]:
        request = self.requests.pop(request_id)
        assert request.phase is PrefillPhase.RELEASING, f"{request_id!r} is {request.phase}"
        if self.pages is not None:
            self.pages.release(request.pages)
        return [*self._give_pages(now), EndRequest(request_id, request.ending)]

    def _in(self, request_id: RequestId, phase: PrefillPhase) -> PrefillRequest | None:
        """Return the request of an outcome; None if it has begun to end, or is gone."""
        request = self.requests.get(request_id)
        if request is None or request.phase in (PrefillPhase.STOPPING, PrefillPhase.RELEASING):
            return None
        assert request.phase is phase, f"{request_id!r} is {request.phase}, not {phase}"
        return request

    # -- audit -------------------------------------------------------------------------------

    def check(self) -> None:
        """Audit: every page has one owner, and every index says what the phases say."""
        self.queue.check()
        requests = self.requests
        assert self._waiting == _in_phases(requests.values(), PrefillPhase.WAITING)
        assert self._choosing.keys() == _in_phases(requests.values(), PrefillPhase.CHOOSING)
        assert set(self.queue.in_order()) == _in_phases(requests.values(), *QUEUED_PHASES)
        assert self._in_pass >= _in_phases(requests.values(), PrefillPhase.STOPPING)
        assert all(
            requests[request_id].phase in (PrefillPhase.COMPUTING, PrefillPhase.STOPPING)
            for request_id in self._in_pass
        )
        held = [page for request in requests.values() for page in request.pages]
        assert len(set(held)) == len(held), "a page belongs to two requests"
        for request in requests.values():
            has_pages = self.pages is not None and request.phase is not PrefillPhase.WAITING
            may_have = request.phase in (PrefillPhase.STOPPING, PrefillPhase.RELEASING)
            n_pages = self._pages_for(request) if has_pages else 0
            assert len(request.pages) == n_pages or (may_have and not request.pages)
            request.flow.check()
            if request.phase is PrefillPhase.RELEASING:
                continue  # it may have left a chunk of a pass that ended after it was stopped
            in_pass = request.request_id in self._in_pass and not request.share.is_whole
            has_chunk = request.flow.computing is not None or request.flow.sending is not None
            assert in_pass == has_chunk
        assert self._n_shares() <= self._rules.max_shares
        if self.pages is not None:
            self.pages.check()
            assert len(held) + self.pages.n_free <= self.pages.n_pages


def _first_new_block(start: StartPrefill, source: KvstoreAddress | None, n_leased: int) -> int:
    """Return the first block that the home kvstore may lack: it has what was leased from it."""
    return n_leased if source is not None and source == start.store_in else 0


def _expected_new_block(start: StartPrefill, n_cached: int) -> int | None:
    """Return `_first_new_block` for a lease of `n_cached` blocks at the first source.

    None if there is nothing to lease, or no block to keep.
    """
    if start.cached is None or not n_cached or start.store_in is None:
        return None
    first = _first_new_block(start, start.cached.kvstore, n_cached)
    return first if start.block_hashes[first:] else None


def _in_phases(requests: Iterable[PrefillRequest], *phases: PrefillPhase) -> set[RequestId]:
    return {request.request_id for request in requests if request.phase in phases}
