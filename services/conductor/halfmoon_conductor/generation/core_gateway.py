"""Send clients' requests through the scheduling core: tries, tokens, endings.

Each try has its own id (`retry_id`), so that late tokens of an abandoned try can't reach the
client. Delivered tokens are kept: the next try's prompt is the client's prompt followed by them,
and its answer goes on from there.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from typing import get_args

import msgspec
import structlog

from halfmoon_conductor.engine_io.gateway_interface import (
    Finish,
    GenerationRequest,
    ModelCard,
    TokenEvent,
)
from halfmoon_conductor.errors import (
    ApiError,
    ContextLengthExceeded,
    GenerationFailed,
    HarmfulRequest,
    InvalidRequest,
    NotSupported,
    ServerOverloaded,
    ServiceUnavailable,
    UnusableGrammar,
)
from halfmoon_conductor.generation.token_turns import TokenTurns
from halfmoon_conductor.observability.metrics.ttft_stages import TtftRecorder, TtftTimestamps
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.unreachable_workers import UnreachableWorkers
from halfmoon_protocol import error_codes
from halfmoon_protocol.blocks import block_hashes
from halfmoon_protocol.ids import RequestId, original_request_id, retry_id
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_protocol.messages import PrefillDone, WorkerInfo
from halfmoon_scheduling.commands import Fail, Reject, Resubmit
from halfmoon_scheduling.events import (
    Casualty,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestProgressed,
    with_casualty,
)

log = structlog.get_logger()

_UNAVAILABLE_RETRY_S = 1.0
#: The finishes that workers report, as the type checker knows them.
_FINISHES: Mapping[str, Finish] = {finish: finish for finish in get_args(Finish)}
#: Read once: a request must not need a file, nor a descriptor for it.
_VERSION = version("halfmoon-conductor")
#: Tokens of one try that prove a request harmless: prefill's token and decode's first.
_HARMLESS_TOKENS = 2
#: A stream stops being computed when so many tokens have waited for its reader for so many seconds.
#: The buffers before them are full by then.
_UNREAD_TOKENS = 64
_UNREAD_S = 3.0


class _OutputQueue:
    """Hold what one reader is to get, at half the cost of `asyncio.Queue`."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[TokenEvent | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: TokenEvent | ApiError) -> None:
        """Add an item, and wake the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> TokenEvent | ApiError:
        """Remove and return the oldest item; wait for one. Only one task may wait."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()


@dataclass
class _Stream:
    """One client's request and what it has received."""

    request: GenerationRequest
    #: Tokens and errors for the client, in order; at most `max_new_tokens` and one error.
    output: _OutputQueue = field(default_factory=_OutputQueue)
    attempt: int = 0
    #: Tokens handed to `output` so far.
    tokens: list[int] = field(default_factory=list)
    #: Number of `tokens` when the current try began.
    n_tokens_before: int = 0
    #: Scores of a finished prefill whose token is not delivered yet.
    first_score: TokenScore | None = None
    prompt_scores: tuple[TokenScore, ...] = ()
    #: Consecutive earlier tries that delivered no token.
    fruitless: int = 0
    #: Workers lost during tries since decode last produced a token of the request.
    casualties: tuple[Casualty, ...] = ()
    #: Whether the last token or an error is in `output`.
    is_over: bool = False
    #: Since when `_UNREAD_TOKENS` wait for the reader; None: fewer wait.
    unread_since_s: float | None = None
    #: Whether no try is under way until the reader has taken what waits.
    is_parked: bool = False
    #: Times of the stages up to the first token.
    timestamps: TtftTimestamps = field(default_factory=TtftTimestamps)

    @property
    def current(self) -> RequestId:
        """The id of the current try."""
        original = RequestId(self.request.request_id)
        return original if self.attempt <= 1 else retry_id(original, self.attempt)

    def end(self, error: ApiError) -> None:
        """End the request with an error, unless it has ended."""
        if not self.is_over:
            self.is_over = True
            self.output.put(error)


class CoreGateway:
    """Implement `Gateway` (see `gateway_interface`) over the scheduling core."""

    def __init__(
        self,
        shell: Shell,
        *,
        served_model_name: str = "",
        wall_clock: Callable[[], float] = time.time,
        unreachable: UnreachableWorkers | None = None,
        late_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._shell = shell
        self._turns = TokenTurns(late_s)
        self._unreachable = unreachable or UnreachableWorkers()
        self._name = served_model_name
        self._created = int(wall_clock())
        #: The model's card, and the workers of which it was made.
        self._card: ModelCard | None = None
        self._card_workers: list[WorkerInfo] = []
        #: By the client's request id, which `original_request_id` returns for the id of every try.
        self._streams: dict[str, _Stream] = {}
        shell.add_recorder(TtftRecorder(self._timestamps_of).record)

    @property
    def model(self) -> ModelCard | None:
        """The model served; None until `ready` was true once. It stays while workers are away."""
        cluster = self._shell.core.cluster
        if cluster.layout is None or (self._card is None and not self.ready()):
            return None
        workers = cluster.workers()
        if all(worker.role == "kvstore" for worker in workers):
            return self._card  # all were lost, and may come back
        if self._card is None or workers != self._card_workers:
            self._card_workers = workers
            max_context = max(worker.max_context for worker in workers)
            pool = _largest_pool(workers, cluster.layout.block_size)
            self._card = ModelCard(
                name=self._name or cluster.model,
                max_context=max_context,
                fits=min(max_context, pool),
                fair_share=max(1, pool // 2),
                created=self._created,
                fingerprint=_fingerprint(cluster.layout.model),
            )
        return self._card

    def ready(self) -> bool:
        """Return whether at least one prefill and one decode worker are alive."""
        return not self.missing()

    def missing(self) -> Sequence[str]:
        """Return the roles without a live worker."""
        cluster = self._shell.core.cluster
        return [role for role in ("prefill", "decode") if not cluster.accepting(role)]

    def missing_hint(self) -> str:
        """Return which registered workers of the missing roles can't be reached."""
        return self._unreachable.hint(self.missing())

    @property
    def n_live(self) -> int:
        """Requests of clients that have not ended."""
        return len(self._streams)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Yield the tokens of a request; see `Gateway.generate`."""
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is in use")
        stream = _Stream(request)
        self._streams[request.request_id] = stream
        self._turns.streams.enter(request.tenant)
        try:
            self._start_try(stream)
            while True:
                if stream.is_parked and not stream.output:
                    self._unpark(stream)
                item = await stream.output.get()
                if isinstance(item, ApiError):
                    raise item
                await self._turns.wait(request.tenant, item.score)
                if len(stream.output) < _UNREAD_TOKENS:
                    stream.unread_since_s = None
                yield item
                if item.finish:
                    return
        finally:
            self._turns.streams.leave(request.tenant)
            del self._streams[request.request_id]
            if not stream.is_over:
                stream.is_over = True
                self._shell.post(RequestCancelled(stream.current))

    # -- calls of the shell and the worker links ---------------------------------------------

    def note_scores(self, done: PrefillDone) -> None:
        """Keep a prefill's scores until its token is delivered; scores skip the core."""
        stream = self._streams.get(original_request_id(done.request_id))
        if stream is not None and stream.current == done.request_id:
            stream.first_score, stream.prompt_scores = done.score, done.prompt_scores

    def deliver(
        self,
        request_id: RequestId,
        token: int,
        finish: str,
        n_cached: int = 0,
        score: TokenScore | None = None,
    ) -> bool:
        """Hand a token to the client; return whether the request still wants tokens."""
        stream = self._live(request_id)
        if stream is None:
            return False
        stream.tokens.append(token)
        if stream.casualties and len(stream.tokens) - stream.n_tokens_before == _HARMLESS_TOKENS:
            stream.casualties = ()
            self._shell.post(RequestProgressed(request_id))
        ending: Finish = (
            _FINISHES[finish] if finish in _FINISHES else msgspec.convert(finish, Finish)
        )
        stream.is_over = bool(ending)
        # Only with the first token: tokens that a later try finds cached save the client nothing.
        is_first = len(stream.tokens) == 1
        reported_cached, prompt_scores = (n_cached, stream.prompt_scores) if is_first else (0, ())
        if score is None:
            score, stream.first_score = stream.first_score, None
        stages = stream.timestamps.stages() if is_first else None
        stream.output.put(TokenEvent(token, ending, reported_cached, score, prompt_scores, stages))
        if len(stream.output) >= _UNREAD_TOKENS:
            self._note_unread(stream)
        return True

    def n_left(self, request_id: RequestId) -> int:
        """Return how many tokens the client may still get; 0 when it is gone or the try is over."""
        stream = self._live(request_id)
        return 0 if stream is None else _n_left(stream)

    def goes_on(self, request_id: RequestId) -> bool:
        """Return whether an open end has tokens left behind the next one of this try."""
        stream = self._streams.get(original_request_id(request_id))
        return stream is not None and stream.request.open_end and self.n_left(request_id) > 1

    def n_produced(self, request_id: RequestId) -> int:
        """Return how many tokens this try has delivered; 0 when its client is gone."""
        stream = self._streams.get(original_request_id(request_id))
        if stream is None or stream.current != request_id:
            return 0
        return len(stream.tokens) - stream.n_tokens_before

    def reject(self, command: Reject) -> None:
        """Refuse a request; one that has tokens and could be served elsewhere has failed."""
        stream = self._streams.get(original_request_id(command.request_id))
        if stream is None or stream.current != command.request_id:
            return
        match command.kind:
            case "unavailable":
                stream.end(self._unavailable(command.reason, command.retry_after_s))
            case _ if stream.tokens:
                stream.end(GenerationFailed(command.reason))
            case "overloaded":
                stream.end(ServerOverloaded(command.reason, command.retry_after_s))
            case "too_long":
                stream.end(ContextLengthExceeded(command.reason))
            case "unsupported":
                stream.end(NotSupported(command.reason))

    def resubmit(self, command: Resubmit) -> None:
        """Start the next try from the tokens delivered so far."""
        stream = self._live(command.request_id)
        if stream is None:
            return
        casualty = command.casualty
        if casualty is not None:
            stream.casualties = with_casualty(stream.casualties, casualty)
        self._start_try(stream, counts=command.counts)

    def fail(self, command: Fail) -> None:
        """End a request with an error: the client's if the request is invalid, else ours."""
        stream = self._streams.get(original_request_id(command.request_id))
        if stream is None or stream.current != command.request_id:
            return
        if command.casualties:
            log.error(
                "harmful_request",
                request_id=stream.request.request_id,
                tenant=stream.request.tenant,
                workers=[casualty.worker_id for casualty in command.casualties],
            )
            stream.end(HarmfulRequest(command.reason))
        elif command.invalid and command.code == error_codes.GRAMMAR_FAILED:
            stream.end(UnusableGrammar(command.reason))
        elif command.invalid:
            stream.end(InvalidRequest(command.reason))
        else:
            stream.end(GenerationFailed(command.reason))

    def _unavailable(self, reason: str, retry_after_s: float) -> ServiceUnavailable:
        hint = self.missing_hint()
        return ServiceUnavailable(f"{reason}. {hint}" if hint else reason, retry_after_s)

    def _timestamps_of(self, request_id: RequestId) -> TtftTimestamps | None:
        stream = self._streams.get(original_request_id(request_id))
        return stream.timestamps if stream is not None and stream.current == request_id else None

    def _live(self, request_id: RequestId) -> _Stream | None:
        """Return the stream whose try under way this is, if it wants tokens."""
        stream = self._streams.get(original_request_id(request_id))
        if stream is None or stream.is_over or stream.is_parked or stream.current != request_id:
            return None
        return stream

    # -- readers that take nothing -----------------------------------------------------------

    def _note_unread(self, stream: _Stream) -> None:
        """End the try of a stream whose reader has taken nothing for long; its place is free."""
        now_s = self._shell.clock.now()
        if stream.unread_since_s is None:
            stream.unread_since_s = now_s
        is_late = now_s - stream.unread_since_s >= _UNREAD_S
        if is_late and not stream.is_over and _n_left(stream) > _UNREAD_TOKENS:
            stream.is_parked = True
            log.info(
                "stream_parked",
                request_id=stream.request.request_id,
                n_unread=len(stream.output),
                reason="its client takes nothing of the answer",
            )
            self._shell.post(RequestCancelled(stream.current))

    def _unpark(self, stream: _Stream) -> None:
        """Go on with a stream whose reader has taken all."""
        stream.is_parked, stream.unread_since_s = False, None
        self._start_try(stream, counts=False)

    # -- tries -------------------------------------------------------------------------------

    def _start_try(self, stream: _Stream, *, counts: bool = True) -> None:
        layout = self._shell.core.cluster.layout
        if layout is None:
            stream.end(self._unavailable("no worker has joined yet", _UNAVAILABLE_RETRY_S))
            return
        if len(stream.tokens) > stream.n_tokens_before:
            stream.fruitless = 0
        elif stream.attempt and counts:
            stream.fruitless += 1
        stream.attempt += 1
        stream.n_tokens_before = len(stream.tokens)
        self._shell.post(RequestArrived(_request_of(stream, layout)))


def _n_left(stream: _Stream) -> int:
    return stream.request.stopping.max_new_tokens - len(stream.tokens)


def _request_of(stream: _Stream, layout: KvLayout) -> Request:
    """Return the current try as the core sees it: delivered tokens are part of the prompt."""
    request = stream.request
    token_ids = (*request.prompt_token_ids, *stream.tokens)
    n_delivered = len(stream.tokens)
    return Request(
        request_id=stream.current,
        token_ids=token_ids,
        n_prompt=len(request.prompt_token_ids),
        block_hashes=tuple(
            block_hashes(
                token_ids, model=layout.model, salt=request.salt, block_size=layout.block_size
            )
        ),
        sampling=request.sampling,
        stopping=msgspec.structs.replace(
            request.stopping,
            max_new_tokens=request.stopping.max_new_tokens - n_delivered,
            min_new_tokens=max(0, request.stopping.min_new_tokens - n_delivered),
        ),
        open_end=request.open_end,
        attempt=stream.attempt,
        fruitless=stream.fruitless,
        casualties=stream.casualties,
        ttft_slo_s=request.ttft_slo_s,
        tbt_slo_s=request.tbt_slo_s,
        tenant=request.tenant,
        cache_salt=request.salt,
        priority=request.priority,
    )


def _largest_pool(workers: Sequence[WorkerInfo], block_size: int) -> int:
    """Return the most tokens that some worker of each role there has pages for.

    Prefill workers count: an answer that has to go on elsewhere is computed again as a prompt.
    """
    pools = [
        max(info.n_blocks * block_size or sys.maxsize for info in of_role)
        for role in ("prefill", "decode")
        if (of_role := [info for info in workers if info.role == role])
    ]
    return min(pools, default=sys.maxsize)


def _fingerprint(model: str) -> str:
    """Return a short name for what computes answers: the model's fingerprint, and our version."""
    made_of = f"{model}/{_VERSION}"
    return f"fp_{blake2b(made_of.encode(), digest_size=6).hexdigest()}"
