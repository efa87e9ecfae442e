"""Run a decode worker: reserve landings, step the continuous batch, send tokens.

Between two steps, `LocalPrefills` may compute a part of a prompt that this worker prefills itself.

`DecodeBatch` decides which requests are in the next step, and on which pages. This shell owns the
engine, the port and the clock. While a forward pass runs in its thread, reservations and starts are
handled at once, since they use free pages only. A request in that pass is freed after it: its pages
are written until then.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import assert_never

import structlog

from halfmoon_engine.errors import EngineLost
from halfmoon_engine.interface import Engine, GrammarFailed, PendingToken, Run, TokenResult
from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_protocol import error_codes
from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import (
    AnyMessage,
    Cancel,
    ChangeRole,
    DecodeCost,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    Message,
    Produced,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    ToDecode,
    TokensProduced,
    Unwelcome,
    WorkerInfo,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_runtime.channels.dropped_messages import record_drop
from halfmoon_runtime.channels.network import PeerId, Port
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.worker.conductor_connections import ConductorConnections
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.housekeeping import HousekeepingPace
from halfmoon_runtime.worker.message_loop import (
    drop_unexpected,
    record_failure,
    serve_messages,
)
from halfmoon_scheduling.decode.decode_batch import BatchStep, DecodeBatch, ReservationRefused
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.prediction.cost_model import unscaled_step_s
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.regions.grant_revocation import GrantRevocation
from halfmoon_workers.decode.answer_keeper import AnswerKeeper
from halfmoon_workers.decode.decode_metrics import DecodeCounts, batch_metrics
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_spans import DecodeSpans
from halfmoon_workers.decode.decode_validation import reserve_fault, start_fault
from halfmoon_workers.decode.generation_states import GenerationStates
from halfmoon_workers.decode.landing_ends import LandingEnds
from halfmoon_workers.decode.landing_keys import LandingKeys, NoLandingKey
from halfmoon_workers.decode.local_prefills import LocalPrefillParts, LocalPrefills
from halfmoon_workers.start.role_switch import RoleSwitch

log = structlog.get_logger()

#: Seconds to wait for a landing's end when all pages are landings.
_PAGES_TAKEN_S = 0.1
#: Seconds to wait for late tokens at a time when there is nothing else to compute.
_LATE_TOKENS_S = 0.02
#: Weight of the newest step in the smoothed step time.
_STEP_WEIGHT = 0.2


@dataclass
class DecodeWorker:
    """Serve one port with one engine over one pool of pages."""

    port: Port
    engine: Engine
    region: Region
    info: WorkerInfo
    settings: DecodeSettings
    clock: Clock
    pages: PageAllocator
    role_switch: RoleSwitch = field(default_factory=RoleSwitch)
    spans: DecodeSpans = field(default_factory=DecodeSpans)
    #: Ends the process when a forward pass hangs.
    watch: ForwardWatchdog = field(default_factory=ForwardWatchdog)
    #: Makes the thread of the forward passes.
    open_forward: Callable[[], ForwardThread] = ForwardThread
    #: Puts blocks of answers into kvstores; None: no answer is kept.
    putter: BlockPutter | None = None
    #: Lends keys of the pool; None: each landing gets the pool's own.
    lender: GrantLender[RequestId] | None = None
    #: Used if the settings allow prefill here; None: they do not.
    prefill_parts: LocalPrefillParts | None = None
    #: None: this worker does not prefill.
    local_prefills: LocalPrefills | None = field(default=None, init=False)
    batch: DecodeBatch = field(init=False)
    landing_keys: LandingKeys = field(init=False)
    landing_ends: LandingEnds = field(init=False)
    answers: AnswerKeeper = field(init=False)
    conductors: ConductorConnections = field(init=False)
    #: Exactly the running requests of the batch.
    _generations: GenerationStates = field(default_factory=GenerationStates, init=False)
    #: Requests in the forward pass under way.
    _in_step: set[RequestId] = field(default_factory=set, init=False)
    #: Requests of that pass to free after it.
    _to_free: set[RequestId] = field(default_factory=set, init=False)
    #: Parent of all tasks, while the worker serves.
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)
    #: Set while no request holds pages here.
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _pace: HousekeepingPace = field(default_factory=HousekeepingPace, init=False)
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
        self.landing_keys = LandingKeys(
            self.region, self.engine.layout, self.settings.landing_ttl_s, self.lender
        )
        self.landing_ends = LandingEnds(
            self.batch, self.landing_keys, self.clock, self.settings.quarantine_s
        )
        self.answers = AnswerKeeper(
            self.pages,
            self.batch.page_of,
            block_size=self.engine.layout.block_size,
            putter=self.putter,
            keeps_pages=self.settings.keep_pages,
        )
        self.conductors = ConductorConnections(self.port, self._on_owner_lost)
        self._idle.set()
        if self.prefill_parts is not None and self.settings.local_prefill_tokens:
            self.local_prefills = LocalPrefills(
                self.prefill_parts,
                self.engine,
                self.batch,
                self.landing_keys,
                self.pages,
                self.conductors,
                self.info,
                self.settings,
                self.clock,
                self.watch,
                self._wake.set,
            )

    @property
    def n_conductors(self) -> int:
        """Conductors that are connected to this worker."""
        return len(self.conductors.owners.conductors)

    async def serve(self) -> None:
        """Answer commands and run steps until cancelled.

        Raises:
            RejectedByConductors: all conductors have refused this worker.
            EngineLost: the engine can't compute any more, in a group of exceptions.
        """
        with ExitStack() as stack:
            forward = stack.enter_context(self.open_forward())
            if self.local_prefills is not None:
                stack.callback(self.local_prefills.close)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.landing_ends.open(tasks)
                if self.local_prefills is not None:
                    self.local_prefills.open(tasks)
                background = [
                    tasks.create_task(self._run_steps(forward)),
                    tasks.create_task(self._run_housekeeping()),
                    tasks.create_task(self.answers.run()),
                ]
                try:
                    await serve_messages(self.port, self._handle)
                finally:
                    self.landing_ends.close()
                    if self.local_prefills is not None:
                        self.local_prefills.stop()
                    for task in background:
                        task.cancel()

    async def drain(self, info: WorkerInfo, limit_s: float) -> None:
        """Announce that no new requests are taken, and wait for the present ones to finish.

        Args:
            info: the worker's record, draining.
            limit_s: seconds to wait at the most.
        """
        self.info = info
        await self.conductors.broadcast_info(info)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
                await self.answers.wait_until_idle()
                if self.local_prefills is not None:
                    await self.local_prefills.shell.idle.wait()

    # -- commands ----------------------------------------------------------------------------

    async def _handle(self, peer: PeerId, message: AnyMessage) -> None:
        if isinstance(message, ToDecode):
            await self._on_message(peer, message)
        else:
            drop_unexpected(self.port, message)

    async def _on_message(self, peer: PeerId, message: ToDecode) -> None:
        match message:
            case ReserveDecode():
                await self._on_reserve(peer, message)
            case StartDecode():
                await self._on_start(peer, message)
            case Cancel():
                self._on_cancel(peer, message)
            case Hello():
                await self.conductors.on_hello(message, peer, self.info)
            case Unwelcome(reason=reason):
                self.conductors.on_unwelcome(peer, reason)
            case ChangeRole():
                greeted = peer in self.conductors.owners.conductors
                self.role_switch.on_change_role(message, self.port, greeted=greeted)
            case StartPrefill() if self.local_prefills is not None:
                await self.local_prefills.start(peer, message)
            case StartPrefill():
                # This worker's record states no `local_prefill_tokens`.
                drop_unexpected(self.port, message)
            case _:
                assert_never(message)

    async def _on_reserve(self, peer: PeerId, reserve: ReserveDecode) -> None:
        request_id = reserve.request_id
        if request_id in self.batch and self.conductors.owners.owner_of(request_id) == peer:
            record_drop("duplicate", self.port.commands, f"ReserveDecode of {request_id}")
            return
        try:
            landing = self._reserve(reserve)
        except ReservationRefused as refusal:
            self._counts.on_give_up("refused")
            await self.conductors.answer(
                peer,
                DecodeRefused(
                    request_id=request_id,
                    reason=refusal.reason,
                    retryable=refusal.retryable,
                    code=refusal.code,
                ),
            )
            return
        self._idle.clear()
        self._pace.wake()
        self.conductors.owners.add(request_id, peer)
        self.spans.on_reserved(reserve, len(landing.pages), self.clock.now())
        await self.conductors.answer(
            peer,
            DecodeReserved(
                request_id=request_id,
                landing=landing,
                expires_s=self.settings.landing_ttl_s,
                n_held_blocks=self.batch.held_blocks(request_id),
            ),
        )

    def _reserve(self, reserve: ReserveDecode) -> Landing:
        """Reserve pages for a landing, and a key to write them.

        Raises:
            ReservationRefused: no pages are reserved.
        """
        request_id = reserve.request_id
        pages = self._reserve_pages(reserve)
        try:
            return self.landing_keys.open(request_id, pages, self.batch.held_blocks(request_id))
        except NoLandingKey as error:
            self.batch.cancel(request_id)
            raise ReservationRefused(str(error), retryable=True, code=error_codes.NO_ROOM) from None

    def _reserve_pages(self, reserve: ReserveDecode) -> list[int]:
        if self.info.draining:
            raise ReservationRefused(
                f"{self.info.worker_id} is stopping: use another one",
                retryable=True,
                code=error_codes.DRAINING,
            )
        if reserve.request_id in self.batch:
            raise ReservationRefused(
                f"another connection has a request {reserve.request_id!r} here: take another id",
                retryable=True,
                code=error_codes.ID_IN_USE,
            )
        if fault := reserve_fault(reserve, self.engine.layout.block_size):
            raise ReservationRefused(fault, retryable=False, code=error_codes.INVALID)
        wanted = (
            reserve.request_id,
            reserve.n_tokens,
            reserve.stopping,
            self.clock.now(),
            reserve.block_hashes if self.settings.keep_pages else (),
        )
        try:
            return self.batch.reserve(*wanted)
        except ReservationRefused as refusal:
            if not refusal.lacks_pages or not self._keeps_blocks:
                raise
        self._give_way()
        return self.batch.reserve(*wanted)

    @property
    def _keeps_blocks(self) -> bool:
        """Return whether blocks here are on their way to a kvstore, perhaps with their pages."""
        return not self.answers.is_idle or (
            self.local_prefills is not None and bool(self.local_prefills.shell.jobs)
        )

    @property
    def _reclaimable_pages(self) -> int:
        local = 0 if self.local_prefills is None else self.local_prefills.reclaimable_pages
        return self.answers.reclaimable_pages + local

    def _give_way(self) -> None:
        """Have blocks on their way to a kvstore give up the pages that nothing else holds."""
        self.answers.give_way()
        if self.local_prefills is not None:
            self.local_prefills.give_way()

    async def _on_start(self, peer: PeerId, start: StartDecode) -> None:
        request_id = start.request_id
        if self.conductors.owners.owner_of(request_id) != peer:
            await self._refuse_start(peer, start, "no landing is held for it on this connection")
            return
        if self.batch.is_running(request_id) or self.landing_ends.is_closing(request_id):
            record_drop("duplicate", self.port.commands, f"StartDecode of {request_id}")
            return
        n_landed = self.batch.n_landed(request_id)
        assert n_landed is not None, "a request with an owner is landing or runs"
        fault = start_fault(
            start,
            n_landed=n_landed,
            n_vocab=self.engine.n_vocab,
            block_size=self.engine.layout.block_size,
        )
        if self.local_prefills is not None and self.local_prefills.is_computing(request_id):
            fault = "its prefill here is not done"
        if fault:
            await self._end_landing(request_id, fault)
            return
        revocation = self.landing_ends.take_back_key(request_id)
        if revocation is None:
            await self._start(start, n_landed)
        else:  # other messages do not wait for it
            assert self._tasks is not None, "messages are handled while the worker serves"
            self._tasks.create_task(self._start_once_written(peer, start, n_landed, revocation))

    async def _start_once_written(
        self, peer: PeerId, start: StartDecode, n_landed: int, revocation: GrantRevocation
    ) -> None:
        """Start a landing when its last write has ended, unless it is freed meanwhile."""
        request_id = start.request_id
        try:
            ended = await self.landing_ends.last_write(request_id, revocation)
            if ended:
                await self._start(start, n_landed)
            elif ended is False:
                self.landing_ends.free(request_id, in_doubt=True)
                why = "its landing is still being written"
                await self._send_all(self._ended(why, request_id, code=error_codes.INTERNAL_ERROR))
        except Exception:  # as for any message: it costs this request alone
            record_failure(start, peer.hex())

    async def _start(self, start: StartDecode, n_landed: int) -> None:
        """Start a landing to which nothing is written any more."""
        request_id = start.request_id
        n_held = self.batch.held_blocks(request_id)
        try:
            self.batch.start(request_id, start.first_token, self.clock.now())
        except KeyError as error:  # it ran out, and is freed
            await self._send_all(
                self._ended(str(error.args[0]), request_id, code=error_codes.EXPIRED)
            )
        except ValueError as error:
            await self._end_landing(request_id, str(error))
        else:
            self._generations.start(start)
            self.answers.start(start, n_landed)
            n_blocks = self.engine.layout.blocks_for(n_landed)
            self._counts.on_landed(n_blocks - n_held, n_held)
            self.spans.on_started(request_id, self.clock.now())
            self._wake.set()

    async def _refuse_start(self, peer: PeerId, start: StartDecode, reason: str) -> None:
        """Answer that nothing runs; a request of another connection with this id stays."""
        failed = DecodeFailed(
            request_id=start.request_id, reason=reason, retryable=True, code=error_codes.NOT_HELD
        )
        await self.conductors.answer(peer, failed)

    async def _end_landing(self, request_id: RequestId, reason: str) -> None:
        """Free a landing that can never be started as was asked, and answer its owner."""
        self._cancel_prefill(request_id)
        self.landing_ends.free(request_id, in_doubt=False)
        ended = self._ended(reason, request_id, retryable=False, code=error_codes.INVALID)
        await self._send_all(ended)

    def _on_cancel(self, peer: PeerId, cancel: Cancel) -> None:
        request_id = cancel.request_id
        if request_id in self.batch and self.conductors.owners.owner_of(request_id) != peer:
            record_drop("foreign", self.port.commands, f"Cancel of {request_id} by {peer.hex()}")
            return
        self._free(request_id, in_doubt=cancel.landing_in_doubt)

    def _on_owner_lost(self, request_id: RequestId) -> None:
        """Free a request whose connection is gone; its landing may be under write."""
        self._free(request_id, in_doubt=True)

    def _free(self, request_id: RequestId, *, in_doubt: bool) -> None:
        """Free a request's pages: at once, or after the forward pass that it is in."""
        if request_id in self._in_step:
            self._to_free.add(request_id)
            return
        self._cancel_prefill(request_id)
        self.landing_ends.free(request_id, in_doubt=in_doubt)
        self._forget(request_id)

    def _cancel_prefill(self, request_id: RequestId) -> None:
        if self.local_prefills is not None:
            self.local_prefills.cancel(request_id)

    def _forget(self, request_id: RequestId, *, finish: str = "", error: str = "") -> None:
        self.spans.on_ended(request_id, self.clock.now(), finish=finish, error=error)
        self._generations.remove(request_id)
        self.answers.end(request_id)
        self.conductors.owners.remove(request_id)
        if self.batch.n_running + self.batch.n_reserved == 0:
            self._idle.set()

    # -- steps -------------------------------------------------------------------------------

    async def _run_steps(self, forward: ForwardThread) -> None:
        while True:
            prefilled = await self._prefill_part(forward)
            if not self.batch.n_running:
                if not prefilled:
                    self._wake.clear()
                    await self._wake.wait()
                continue
            if self._keeps_blocks and self.batch.lacks_pages:
                self._give_way()
            step = self.batch.next_step()
            self._in_step = {row.request_id for row in step.rows}
            for _ in step.preempted:
                self._counts.on_give_up("preempted")
            late = self._generations.late
            for request_id in step.preempted:
                late.pop(request_id, None)
            self._in_step |= late.keys()
            preempted = "preempted: no page is free for its next token"
            await self._send_all(
                self._ended(preempted, *step.preempted, code=error_codes.PREEMPTED)
            )
            if not step.rows and not late:
                # All pages are landings: the oldest request waits for one to end.
                await asyncio.sleep(_PAGES_TAKEN_S)
                continue
            began = self.clock.now()
            chosen = await self._compute(step, late, forward)
            took = self.clock.now() - began
            self.spans.on_step(self._in_step, began, began + took)
            if step.rows:  # a wait for late tokens alone is no step
                self._counts.on_step(took, len(step.rows))
                if self.local_prefills is not None:
                    self.local_prefills.pacing.on_steps(1, took)
                self._step_s += (took - self._step_s) * (_STEP_WEIGHT if self._step_s else 1.0)
            self._in_step = set()
            for request_id in self._to_free:
                self._free(request_id, in_doubt=False)
            self._to_free.clear()
            await self._deliver([*(row.request_id for row in step.rows), *late], chosen)

    async def _prefill_part(self, forward: ForwardThread) -> bool:
        """Compute a part of a prompt before the next step; return whether there was one."""
        if self.local_prefills is None:
            return False
        n_running, step_s = self.batch.n_running, 0.0
        if n_running:
            cost = self.info.decode_cost or DecodeCost()
            expected_s = unscaled_step_s(cost, n_running, self.batch.context_tokens)
            step_s = max(expected_s, self._step_s)
        return await self.local_prefills.run_pass(forward, step_s)

    async def _compute(
        self, step: BatchStep, late: Mapping[RequestId, PendingToken], forward: ForwardThread
    ) -> dict[RequestId, TokenResult]:
        """Run a step, and choose tokens that were late in earlier ones; leave out failures.

        When a batch fails, one of its requests may be the cause, and the error does not tell which.
        So each one is computed once more by itself.
        """
        in_step = [*(row.request_id for row in step.rows), *late]
        runs = self._generations.runs_of(step)
        batch = await self._try_forward(runs, [*late.values()], forward)
        if batch is not None:
            return dict(zip(in_step, batch, strict=True))
        chosen: dict[RequestId, TokenResult] = {}
        rows = {row.request_id: row for row in step.rows}
        for request_id in in_step if len(in_step) > 1 else ():
            if request_id in self._to_free:
                continue
            row, token = rows.get(request_id), late.get(request_id)
            alone = self._generations.runs_of(BatchStep((row,), ()), again=True) if row else []
            one = await self._try_forward(alone, [] if token is None else [token], forward)
            if one is not None:
                chosen[request_id] = one[0]
        return chosen

    async def _try_forward(
        self, runs: Sequence[Run], late: Sequence[PendingToken], forward: ForwardThread
    ) -> list[TokenResult] | None:
        try:
            return await forward.run(self.watch.run, self._forward, runs, late)
        except EngineLost:
            raise
        except Exception:
            log.exception("step_failed", n_rows=len(runs))
            return None

    def _forward(self, runs: Sequence[Run], late: Sequence[PendingToken]) -> list[TokenResult]:
        """Run one forward pass, in its thread."""
        chosen = self.engine.forward(runs) if runs else []
        finished = self.engine.finish(late, 0.0 if runs else _LATE_TOKENS_S) if late else []
        return [*(each for each in chosen if each is not None), *finished]

    async def _deliver(
        self, in_step: Sequence[RequestId], chosen: Mapping[RequestId, TokenResult]
    ) -> None:
        """Record a step's tokens, and send each connection its own in one message.

        All state is up to date before the first message is sent: others may arrive meanwhile.
        """
        self._n_steps += 1
        produced: dict[RequestId, Produced] = {}
        failed: list[RequestId] = []
        grammar_failed: dict[RequestId, GrammarFailed] = {}
        for request_id in in_step:
            # Missing requests were freed while the pass was running.
            if request_id not in self._generations:
                continue
            if (token := chosen.get(request_id)) is None:
                failed.append(request_id)
            elif isinstance(token, GrammarFailed):
                grammar_failed[request_id] = token
            elif isinstance(token, PendingToken):
                self._generations.hold(request_id, token)
                self.batch.hold(request_id)
            else:
                self._generations.add(request_id, token)
                self.answers.on_token(request_id, token)
                finish = self.batch.on_token(request_id, token)
                produced[request_id] = Produced(request_id, token, finish)
        self._counts.on_tokens(len(produced))
        messages: list[tuple[PeerId, Message]] = []
        for peer, request_ids in self.conductors.owners.group_by_owner(produced).items():
            mine = tuple(produced[request_id] for request_id in request_ids)
            scores = self._generations.take_scores(request_ids)
            messages.append(
                (peer, TokensProduced(step=self._n_steps, produced=mine, scores=scores))
            )
        for request_id, outcome in produced.items():
            if outcome.finish:
                self._forget(request_id, finish=outcome.finish)
        for request_id in (*failed, *grammar_failed):
            self.batch.cancel(request_id)
        for _ in failed:
            self._counts.on_give_up("step_failed")
        messages += self._ended("the forward pass failed", *failed, code=error_codes.INTERNAL_ERROR)
        for request_id, why in grammar_failed.items():
            messages += self._ended(
                why.reason,
                request_id,
                retryable=why.retryable,
                invalid=why.invalid,
                code=error_codes.GRAMMAR_FAILED,
            )
        await self._send_all(messages)

    def _ended(
        self,
        reason: str,
        *request_ids: RequestId,
        code: str,
        retryable: bool = True,
        invalid: bool = False,
    ) -> list[tuple[PeerId, Message]]:
        """Forget requests that the batch no longer holds; return the messages to their owners."""
        messages: list[tuple[PeerId, Message]] = []
        for request_id in request_ids:
            peer = self.conductors.owners.owner_of(request_id)
            self._forget(request_id, error=reason)
            if peer is not None:
                failed = DecodeFailed(
                    request_id=request_id,
                    reason=reason,
                    retryable=retryable,
                    invalid=invalid,
                    code=code,
                )
                messages.append((peer, failed))
        return messages

    async def _send_all(self, messages: Sequence[tuple[PeerId, Message]]) -> None:
        for peer, message in messages:
            await self.conductors.answer(peer, message)

    # -- housekeeping ------------------------------------------------------------------------

    async def _run_housekeeping(self) -> None:
        """Free landings that expired, publish the worker's load, and check the engine."""
        while True:
            self.engine.check_alive()
            now = self.clock.now()
            late = self.landing_ends.expire()
            for request_id in late:
                self._counts.on_give_up("not_landed")
                self._cancel_prefill(request_id)
            await self._send_all(
                self._ended(
                    "its KV did not land before the deadline", *late, code=error_codes.EXPIRED
                )
            )
            await self.conductors.probe(self.info, now)
            await self.port.publish(
                DecodeLoad(
                    n_running=self.batch.n_running,
                    n_reserved=self.batch.n_reserved,
                    context_tokens=self.batch.context_tokens,
                    free_pages=self.batch.free_pages + self._reclaimable_pages,
                    n_pages=self.pages.n_pages,
                    step_s=self._step_s,
                )
            )
            await self._pace.wait(idle=self._idle.is_set())

    def metrics(self) -> MetricSnapshot:
        """Return the worker's metrics."""
        local = {} if self.local_prefills is None else self.local_prefills.metrics()
        return {
            **self._counts.metrics(),
            **batch_metrics(self.batch, self.pages),
            **self.answers.metrics(),
            **local,
        }

    def check(self) -> None:
        """Audit the batch; each running request has a state, each owned one is in the batch.

        Requests, their answers' puts and the prompts here are all holders of pages.
        """
        local_pages: list[int] = []
        if self.local_prefills is not None:
            self.local_prefills.check()
            local_pages = self.local_prefills.held_pages
        self.batch.check()
        self.landing_keys.check(
            {r for r in self.batch.request_ids() if not self.batch.is_running(r)}
        )
        self.answers.check()
        n_holds = Counter([*self.batch.held_pages, *self.answers.held_pages, *local_pages])
        assert all(self.pages.n_holders(page) == n for page, n in n_holds.items())
        assert len(n_holds) + self.pages.n_free == self.pages.n_pages
        assert len(self._generations) == self.batch.n_running
        assert self.conductors.owners.request_ids() <= set(self.batch.request_ids())
