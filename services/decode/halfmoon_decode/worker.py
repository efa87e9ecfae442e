"""The decode worker at work: landings, the continuous batch, tokens out.

`DecodeBatch` decides who is in the next step and on which pages; this shell owns the engine,
the port and the clock. While a forward pass runs in its thread, reservations and starts are
taken at once (they touch free pages only), but a request in that pass is let go after it: its
pages are being written until then.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from halfmoon_decode.generations import Generations
from halfmoon_decode.readings import DecodeCounts, batch_readings
from halfmoon_decode.settings import DecodeSettings
from halfmoon_decode.tracing import DecodeTraces
from halfmoon_engine.interface import Chosen, Engine, Late, NotFollowed, Run
from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    Cancel,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    Message,
    Produced,
    ReserveDecode,
    StartDecode,
    TokensProduced,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.conductors import Conductors
from halfmoon_runtime.network import PeerId, Port
from halfmoon_runtime.readings import Readings
from halfmoon_scheduling.decode_batch import DecodeBatch, Refusal
from halfmoon_scheduling.pages import PageAllocator

log = structlog.get_logger()

_HOUSEKEEPING_S = 0.1
#: How long to wait for late tokens at a time when there is nothing else to compute.
_LATE_S = 0.02
#: Weight of the newest step in the smoothed step time.
_STEP_WEIGHT = 0.2


@dataclass
class DecodeWorker:
    """Serves one port with one engine over one pool."""

    port: Port
    engine: Engine
    region: Region
    info: WorkerInfo
    settings: DecodeSettings
    clock: Clock
    pages: PageAllocator
    traces: DecodeTraces = field(default_factory=DecodeTraces)
    batch: DecodeBatch = field(init=False)
    conductors: Conductors = field(init=False)
    #: Running requests; its keys are the batch's running ones.
    _generations: Generations = field(default_factory=Generations, init=False)
    #: Requests in the forward pass that runs now.
    _in_step: set[RequestId] = field(default_factory=set, init=False)
    #: Requests in that pass that are to be let go after it.
    _to_cancel: set[RequestId] = field(default_factory=set, init=False)
    #: Set while no request holds anything here.
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _counts: DecodeCounts = field(default_factory=DecodeCounts, init=False)
    _n_steps: int = field(default=0, init=False)
    _step_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.batch = DecodeBatch(
            self.pages,
            block_size=self.engine.layout.block_size,
            max_running=self.settings.max_running,
            max_context=self.engine.max_context,
            landing_ttl_s=self.settings.landing_ttl_s,
        )
        self.conductors = Conductors(self.port, self._on_orphan)
        self._idle.set()

    async def serve(self) -> None:
        """Answer commands and run steps until cancelled.

        Raises:
            LayoutMismatch: a conductor refused this worker, with its reason.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="forward") as forward:
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(self._step_forever(forward)),
                    tasks.create_task(self._keep_house()),
                ]
                try:
                    while True:
                        peer, message = await self.port.receive()
                        await self._handle(peer, message)
                finally:
                    for task in others:
                        task.cancel()

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Say that nothing new is taken, and finish what is here, for so long at the most."""
        self.info = info
        await self.conductors.introduce(info)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    # -- commands ----------------------------------------------------------------------------

    async def _handle(self, peer: PeerId, message: Message) -> None:
        match message:
            case ReserveDecode():
                await self._on_reserve(peer, message)
            case StartDecode():
                await self._on_start(peer, message)
            case Cancel(request_id=request_id):
                self._let_go(RequestId(request_id), in_doubt=message.landing_in_doubt)
            case Hello(conductor_id=conductor):
                await self.conductors.greet(conductor, peer, self.info)
            case Unwelcome(reason=reason):
                raise LayoutMismatch(reason)
            case _:
                log.warning("unexpected_message", message_type=type(message).__name__)

    async def _on_reserve(self, peer: PeerId, wanted: ReserveDecode) -> None:
        request_id = wanted.request_id
        try:
            pages = self.batch.reserve(
                request_id, wanted.n_tokens, wanted.stopping, self.clock.now()
            )
        except Refusal as refusal:
            self._counts.gave_up("refused")
            await self.conductors.answer(
                peer,
                DecodeRefused(
                    request_id=request_id, reason=refusal.reason, retryable=refusal.retryable
                ),
            )
            return
        except ValueError as error:  # a duplicate: the first one stands
            log.warning("reservation_ignored", request_id=request_id, reason=str(error))
            return
        self._idle.clear()
        self.conductors.owners.add(request_id, peer)
        self.traces.reserved(wanted, len(pages), self.clock.now())
        landing = Landing(self.region, tuple(pages), self.engine.layout)
        await self.conductors.answer(
            peer,
            DecodeReserved(
                request_id=request_id, landing=landing, expires_s=self.settings.landing_ttl_s
            ),
        )

    async def _on_start(self, peer: PeerId, start: StartDecode) -> None:
        request_id = start.request_id
        try:
            self.batch.start(request_id, start.first_token, self.clock.now())
        except KeyError as error:
            reason = str(error.args[0])
            self._forget(request_id, error=reason)
            await self.conductors.answer(
                peer, DecodeFailed(request_id=request_id, reason=reason, retryable=True)
            )
            return
        self._generations.start(start)
        self.traces.started(request_id, self.clock.now())
        self._wake.set()

    def _on_orphan(self, request_id: RequestId) -> None:
        """Nobody waits for it any more; whether somebody writes its landing is not known."""
        self._let_go(request_id, in_doubt=True)

    def _let_go(self, request_id: RequestId, *, in_doubt: bool) -> None:
        """Free all that a request holds: at once, or after the forward pass it is in."""
        if request_id in self._in_step:
            self._to_cancel.add(request_id)
            return
        aside_until_s = self.clock.now() + self.settings.quarantine_s if in_doubt else None
        self.batch.cancel(request_id, aside_until_s=aside_until_s)
        self._forget(request_id)

    def _forget(self, request_id: RequestId, *, finish: str = "", error: str = "") -> None:
        self.traces.ended(request_id, self.clock.now(), finish=finish, error=error)
        self._generations.drop(request_id)
        self.conductors.owners.drop(request_id)
        if self.batch.n_running + self.batch.n_reserved == 0:
            self._idle.set()

    # -- steps -------------------------------------------------------------------------------

    async def _step_forever(self, forward: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.batch.n_running:
                self._wake.clear()
                await self._wake.wait()
            step = self.batch.next_step()
            for request_id in step.preempted:
                self._counts.gave_up("preempted")
                await self._fail(request_id, "preempted: no page is free for its next token")
            late = self._generations.late
            if not step.rows and not late:
                # The pool is full of landings: the oldest waits for one to end.
                await asyncio.sleep(_HOUSEKEEPING_S)
                continue
            in_step = [*(row.request_id for row in step.rows), *late]
            self._in_step = set(in_step)
            began = self.clock.now()
            chosen: list[Chosen] | None
            try:
                chosen = await loop.run_in_executor(
                    forward, self._compute, self._generations.runs_of(step), [*late.values()]
                )
            except Exception:
                log.exception("step_failed", n_rows=len(step.rows))
                chosen = None
            took = self.clock.now() - began
            self.traces.stepped(self._in_step, began, began + took)
            self._counts.step(took, len(step.rows))
            self._step_s += (took - self._step_s) * (_STEP_WEIGHT if self._step_s else 1.0)
            self._in_step = set()
            for request_id in self._to_cancel:
                self._let_go(request_id, in_doubt=False)
            self._to_cancel.clear()
            if chosen is not None:
                await self._deliver(dict(zip(in_step, chosen, strict=True)))
            else:
                for request_id in in_step:
                    if self.batch.cancel(request_id):
                        self._counts.gave_up("step_failed")
                        await self._fail(request_id, "the forward pass failed")

    def _compute(self, runs: Sequence[Run], late: Sequence[Late]) -> list[Chosen]:
        """Run a step, and choose what was late in earlier ones; in the forward's thread."""
        chosen = self.engine.forward(runs) if runs else []
        finished = self.engine.finish(late, 0.0 if runs else _LATE_S) if late else []
        return [*(each for each in chosen if each is not None), *finished]

    async def _deliver(self, chosen: Mapping[RequestId, Chosen]) -> None:
        """Record a step's tokens and tell each conductor of its own, in one message each."""
        self._n_steps += 1
        produced: dict[RequestId, Produced] = {}
        stuck: dict[RequestId, NotFollowed] = {}
        for request_id, token in chosen.items():
            # Those that are missing were let go while the pass was running.
            if request_id not in self._generations:
                continue
            if isinstance(token, NotFollowed):
                stuck[request_id] = token
            elif isinstance(token, Late):
                self._generations.hold(request_id, token)
                self.batch.hold(request_id)
            else:
                self._generations.add(request_id, token)
                finish = self.batch.produced(request_id, token)
                produced[request_id] = Produced(request_id, token, finish)
        self._counts.produced(len(produced))
        for peer, request_ids in self.conductors.owners.group(produced).items():
            mine = tuple(produced[request_id] for request_id in request_ids)
            await self.conductors.answer(
                peer,
                TokensProduced(
                    step=self._n_steps,
                    produced=mine,
                    scores=self._generations.take_scores(request_ids),
                ),
            )
        for request_id, outcome in produced.items():
            if outcome.finish:
                self._forget(request_id, finish=outcome.finish)
        for request_id, why in stuck.items():
            self.batch.cancel(request_id)
            await self._fail(request_id, why.reason, retryable=False, invalid=why.invalid)

    async def _fail(
        self, request_id: RequestId, reason: str, *, retryable: bool = True, invalid: bool = False
    ) -> None:
        """Tell the owner that a request, which the batch holds no more, is gone."""
        peer = self.conductors.owners.of(request_id)
        self._forget(request_id, error=reason)
        if peer is not None:
            failed = DecodeFailed(
                request_id=request_id, reason=reason, retryable=retryable, invalid=invalid
            )
            await self.conductors.answer(peer, failed)

    # -- housekeeping ------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        """Give up landings that nobody started, say how busy it is."""
        while True:
            now = self.clock.now()
            for request_id in self.batch.expire(now):
                self._counts.gave_up("not_landed")
                await self._fail(request_id, "its KV did not land before the deadline")
            await self.port.publish(
                DecodeLoad(
                    n_running=self.batch.n_running,
                    n_reserved=self.batch.n_reserved,
                    context_tokens=self.batch.context_tokens,
                    free_pages=self.batch.free_pages,
                    n_pages=self.pages.n_pages,
                    step_s=self._step_s,
                )
            )
            await asyncio.sleep(_HOUSEKEEPING_S)

    def readings(self) -> Readings:
        """What the metrics show."""
        return {**self._counts.readings(), **batch_readings(self.batch, self.pages)}

    def check(self) -> None:
        """Audit: the batch, and that every request here has what it should and an owner."""
        self.batch.check()
        assert len(self._generations) == self.batch.n_running
