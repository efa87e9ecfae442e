"""A decode worker of the simulated world: the live one's `DecodeBatch`, a modelled engine.

No event per token. Steps in which no request finishes, needs a page or joins differ only in how
much context they read. So a run of them is advanced at once. Step i (from 0) of a run over
b requests with c tokens of context takes

    a + i·g        with a = d0 + d1·b + d2·c, g = d2·b

Whatever changes the batch waits for the end of the step under way, as it does live.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    Cancel,
    ChangeRole,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    Hello,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    ToConductor,
    ToDecode,
    Unwelcome,
)
from halfmoon_protocol.regions import Landing, Region
from halfmoon_scheduling.decode.decode_batch import BatchStep, DecodeBatch, ReservationRefused
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_answers import SimAnswers
from halfmoon_simulator.cluster.sim_kvstore import SimKvstore
from halfmoon_simulator.cluster.sim_local_prefill import LocalPart, SimLocalPrefills
from halfmoon_simulator.cluster.sim_prefill import FIRST_TOKEN_ID, STOP_TOKEN_ID
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.token_intervals import TokenIntervals

#: Weight of the newest step in the smoothed step time, as live.
_STEP_WEIGHT = 0.2
#: Seconds until a batch that can't step looks again, as live.
_RETRY_S = 0.1


@dataclass(eq=False, slots=True)
class _Generation:
    """A running request."""

    #: Tokens that will have come when it is over, the first one included.
    n_output: int
    n_new: int
    #: Where its intervals begin in the worker's log, and what the first one has before it.
    log_start: int
    gap_s: float


@dataclass(eq=False, slots=True)
class _Run:
    """Steps under way."""

    began_s: float
    n_steps: int
    first_step_s: float
    growth_s: float
    #: The one step of a run in which a request finishes or needs a page; None: none does.
    step: BatchStep | None
    #: Requests in it, and tokens of context at its start.
    n_requests: int
    context_tokens: int
    #: A part of a prompt that is prefilled in it; it has one step then.
    local: LocalPart | None = None

    def after_s(self, n_steps: int) -> float:
        """Return the seconds from its start to the end of its first `n_steps` steps."""
        return n_steps * self.first_step_s + self.growth_s * n_steps * (n_steps - 1) / 2

    def steps_over(self, seconds: float) -> int:
        """Steps that have ended so long after its start."""
        n = min(self.n_steps, int(seconds / self.first_step_s))
        if self.growth_s > 0:
            half = self.growth_s / 2
            b = self.first_step_s - half
            n = min(n, int((math.sqrt(b * b + 4 * half * seconds) - b) / (2 * half)) + 1)
        while n > 0 and self.after_s(n) > seconds:
            n -= 1
        return n


class SimDecode:
    """One decode worker."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        spec: ClusterSpec,
        costs: CostFile,
        event_queue: EventQueue,
        network: NetworkModel,
        kvstores: Callable[[WorkerId], SimKvstore | None],
        n_output: Callable[[RequestId], int],
        answer: Callable[[WorkerId, ToConductor], None],
        finished: Callable[[RequestId, TokenIntervals], None],
        interrupted: Callable[[RequestId, int, TokenIntervals], None],
        chain_of: Callable[[RequestId], tuple[BlockHash, ...]] = lambda _: (),
    ) -> None:
        """Create an idle worker.

        Args:
            worker_id: its name.
            host: where it runs.
            spec: sizes.
            costs: times.
            event_queue: the clock.
            network: moves bytes.
            kvstores: a live kvstore by name.
            n_output: tokens that this try of a request will get in all.
            answer: says something to the conductor.
            finished: a request got its last token.
            interrupted: a request lost its pages after so many tokens of this try.
            chain_of: blocks of a request's prompt and answer, where they are known.
        """
        self.worker_id = worker_id
        self.host = host
        self.dead = False
        self.layout: KvLayout = costs.layout(spec.block_tokens)
        self.pages = PageAllocator(spec.pages(costs))
        self.batch = DecodeBatch(
            self.pages,
            block_size=spec.block_tokens,
            max_running=spec.max_running,
            max_context=costs.max_context,
            landing_ttl_s=spec.landing_ttl_s,
        )
        self._spec = spec
        self._costs = costs
        self._event_queue = event_queue
        self._n_output = n_output
        self._answer = answer
        self._finished = finished
        self._interrupted = interrupted
        size = self.pages.n_pages * self.layout.block_bytes
        self._region = Region(segment=worker_id, generation=1, key=bytes(16), length=size)
        self._generations: dict[RequestId, _Generation] = {}
        self.answers = SimAnswers(
            worker_id, host, self.layout.block_bytes, network, kvstores, chain_of
        )
        #: What it prefills by itself.
        self.local = SimLocalPrefills(
            worker_id,
            host,
            spec,
            costs,
            event_queue,
            network,
            kvstores,
            n_output,
            answer,
            self._cut,
        )
        self._run: _Run | None = None
        #: Counts runs; an end that was foreseen for an earlier plan is void.
        self._version = 0
        #: What came during a step and takes effect at its end.
        self._starts: list[tuple[StartDecode, float]] = []
        self._cancels: list[RequestId] = []
        #: All runs so far: steps, and the mean seconds of one.
        self._log: list[tuple[int, float]] = []
        self._step_s = 0.0
        self.busy_s = 0.0
        self.n_steps = 0

    # -- what the world asks -----------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """Seconds of a step over what is running now; 0 when nothing is."""
        n = self.batch.n_running
        return self._costs.step_s(n, self._context_tokens) if n else 0.0

    @property
    def _context_tokens(self) -> int:
        run, context = self._run, self.batch.context_tokens
        if run is None or run.step is not None:
            return context
        return context + run.n_requests * run.steps_over(self._event_queue.now - run.began_s)

    @property
    def _smoothed_step_s(self) -> float:
        """The mean step so far, the steps of a run that goes on included."""
        run = self._run
        if run is None:
            return self._step_s
        n_steps = run.steps_over(self._event_queue.now - run.began_s)
        return self._smoothed(run.after_s(n_steps) / n_steps, n_steps) if n_steps else self._step_s

    def _smoothed(self, mean_s: float, n_steps: int) -> float:
        """Return the running mean after so many further steps of such a length."""
        weight = 1 - (1 - _STEP_WEIGHT) ** n_steps if self._step_s else 1.0
        return self._step_s + (mean_s - self._step_s) * weight

    @property
    def idle(self) -> bool:
        """Return whether no request is here, nor pages kept for one."""
        has_requests = self.batch.n_running or self.batch.n_reserved or self._starts
        return not has_requests and self.answers.is_idle

    def load(self) -> DecodeLoad:
        """Return the load report of this moment."""
        return DecodeLoad(
            n_running=self.batch.n_running,
            n_reserved=self.batch.n_reserved,
            context_tokens=self._context_tokens,
            free_pages=self.batch.free_pages,
            n_pages=self.pages.n_pages,
            step_s=self._smoothed_step_s,
        )

    def receive(self, message: ToDecode) -> None:
        """Take a conductor's message."""
        match message:
            case ReserveDecode():
                self._on_reserve(message)
            case StartDecode():
                self._on_start(message)
            case StartPrefill():
                self.local.begin(message)
            case Cancel():
                self._on_cancel(message)
            case Hello() | Unwelcome() | ChangeRole():
                raise AssertionError(f"{self.worker_id} got {message!r}")
            case _:
                assert_never(message)

    def crash(self) -> None:
        """Lose the process; its clients keep what they have."""
        self.dead = True
        self.local.crash()
        self.answers.crash()
        run = self._run
        over = 0
        if run is not None and run.step is None:
            over = run.steps_over(self._event_queue.now - run.began_s)
            self._log_run(run, over)
        for request_id, generation in self._generations.items():
            generation.n_new += over
            self._interrupted(request_id, generation.n_new, self._intervals(generation))

    def expire(self) -> None:
        """Free pages that were aside for long enough, and landings that were never started."""
        for request_id in self.batch.expire(self._event_queue.now):
            self.local.cancel(request_id)
            failed = DecodeFailed(
                request_id=request_id,
                reason="its KV did not land before the deadline",
                retryable=True,
            )
            self._answer(self.worker_id, failed)

    # -- commands ----------------------------------------------------------------------------

    def _on_reserve(self, wanted: ReserveDecode) -> None:
        request_id = wanted.request_id
        try:
            pages = self.batch.reserve(
                request_id, wanted.n_tokens, wanted.stopping, self._event_queue.now
            )
        except ReservationRefused as refusal:
            refused = DecodeRefused(
                request_id=request_id, reason=refusal.reason, retryable=refusal.retryable
            )
            self._answer(self.worker_id, refused)
            return
        reserved = DecodeReserved(
            request_id=request_id,
            landing=Landing(self._region, tuple(pages), self.layout),
            expires_s=self._spec.landing_ttl_s,
        )
        self._answer(self.worker_id, reserved)

    def _on_start(self, start: StartDecode) -> None:
        self._starts.append((start, self._event_queue.now))
        self._cut()

    def _on_cancel(self, cancel: Cancel) -> None:
        request_id = cancel.request_id
        in_step = self._run is not None and self._run.local is not None
        if request_id in self._generations or (in_step and request_id in self.local):
            self._cancels.append(request_id)
            self._cut()
            return
        self._starts = [entry for entry in self._starts if entry[0].request_id != request_id]
        self.local.cancel(request_id)
        aside_s = (
            self._event_queue.now + self._spec.quarantine_s if cancel.landing_in_doubt else None
        )
        self.batch.cancel(request_id, aside_until_s=aside_s)

    # -- steps -------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Let the run end with the step under way; without a run, begin one."""
        run = self._run
        if run is None:
            self._begin()
            return
        elapsed_s = self._event_queue.now - run.began_s
        n_steps = run.steps_over(elapsed_s)
        if run.after_s(n_steps) < elapsed_s or n_steps == 0:
            n_steps += 1
        if n_steps < run.n_steps:
            run.n_steps = n_steps
            self._plan_end(run)

    def _plan_end(self, run: _Run) -> None:
        self._version += 1
        end_s = run.began_s + run.after_s(run.n_steps)
        self._event_queue.at(end_s, self._on_run_end, self._version)

    def _begin(self) -> None:
        """Take arrivals and cancellations between two steps, and begin the next run."""
        self._border()
        prompts = self.local.machine.requests
        if prompts and (part := self.local.take(self.step_s)) is not None:
            self._begin_with(part)
            return
        n_requests = self.batch.n_running
        if not n_requests:
            return
        least_left = min(g.n_output - g.n_new for g in self._generations.values())
        n_steps = min(self.batch.quiet_steps, least_left - 1)
        if prompts and (n_until_due := self.local.pacing.steps_until_due(self.step_s)):
            n_steps = min(n_steps, n_until_due)
        step = None
        if n_steps < 1:
            n_steps = 1
            step = self.batch.next_step()
            for request_id in step.preempted:
                self._preempt(request_id)
            if not step.rows:
                self._version += 1
                self._event_queue.after(_RETRY_S, self._on_retry, self._version)
                return
            n_requests = len(step.rows)
        context = self.batch.context_tokens
        self._run = _Run(
            self._event_queue.now,
            n_steps,
            self._costs.step_s(n_requests, context),
            self._costs.context_step_s(n_requests) * n_requests,
            step,
            n_requests,
            context,
        )
        self._plan_end(self._run)

    def _begin_with(self, part: LocalPart) -> None:
        """Begin a step with a part of a prompt in it."""
        step = self.batch.next_step() if self.batch.n_running else BatchStep((), ())
        for request_id in step.preempted:
            self._preempt(request_id)
        n_requests, context = len(step.rows), self.batch.context_tokens
        seconds = part.alone_s
        if n_requests:
            seconds = part.seconds + self._costs.step_s(n_requests, context)
        self._run = _Run(self._event_queue.now, 1, seconds, 0.0, step, n_requests, context, part)
        self._plan_end(self._run)

    def _border(self) -> None:
        for request_id in self._cancels:
            if self._generations.pop(request_id, None) is not None or request_id in self.local:
                self.local.cancel(request_id)
                self.batch.cancel(request_id)
                self.answers.end(request_id)
        self._cancels.clear()
        starts, self._starts = self._starts, []
        for start, since_s in starts:
            request_id = start.request_id
            n_landed = self.batch.n_landed(request_id) or 0
            try:
                self.batch.start(request_id, start.first_token, self._event_queue.now)
            except KeyError as error:
                failed = DecodeFailed(
                    request_id=request_id, reason=str(error.args[0]), retryable=True
                )
                self._answer(self.worker_id, failed)
                continue
            self.answers.start(start, n_landed // self.layout.block_size)
            gap_s = self._event_queue.now - since_s + 2 * self._costs.message_s  # there and back
            self._generations[request_id] = _Generation(
                self._n_output(request_id), 1, len(self._log), gap_s
            )

    def _on_retry(self, version: int) -> None:
        if version == self._version and not self.dead and self._run is None:
            self._begin()

    def _on_run_end(self, version: int) -> None:
        if version != self._version or self.dead:
            return
        run = self._run
        assert run is not None
        self._run = None
        self._log_run(run, run.n_steps)
        if run.step is None:
            self.batch.skip(run.n_steps)
            for generation in self._generations.values():
                generation.n_new += run.n_steps
        else:
            self._produce(run.step)
        if run.local is not None:
            self.local.computed()
        self._begin()

    def _produce(self, step: BatchStep) -> None:
        """Give each request of the step a token; end those that have all of theirs."""
        size = self.layout.block_size
        for row in step.rows:
            generation = self._generations[row.request_id]
            generation.n_new += 1
            over = generation.n_new >= generation.n_output
            # A run of steps ends where a block does: the next row needs a page.
            if row.position % size == 0:
                self.answers.on_block(row.request_id, row.position // size - 1)
            if over and (row.position + 1) % size == 0:
                self.answers.on_block(row.request_id, row.position // size)
            if self.batch.on_token(row.request_id, STOP_TOKEN_ID if over else FIRST_TOKEN_ID):
                del self._generations[row.request_id]
                self.answers.end(row.request_id)
                self._finished(row.request_id, self._intervals(generation))

    def _preempt(self, request_id: RequestId) -> None:
        generation = self._generations.pop(request_id)
        self.answers.end(request_id)
        self._interrupted(request_id, generation.n_new, self._intervals(generation))
        failed = DecodeFailed(
            request_id=request_id,
            reason="preempted: no page is free for its next token",
            retryable=True,
        )
        self._answer(self.worker_id, failed)

    def _log_run(self, run: _Run, n_steps: int) -> None:
        if not n_steps:
            return
        mean_s = run.after_s(n_steps) / n_steps
        self._log.append((n_steps, mean_s))
        if run.local is None:  # what decoding takes, without what it did besides
            self._step_s = self._smoothed(mean_s, n_steps)
            self.local.pacing.on_steps(n_steps, mean_s)
        elif run.n_requests:
            self.local.pacing.on_steps(1, max(0.0, mean_s - run.local.seconds))
        self.busy_s += mean_s * n_steps
        self.n_steps += n_steps

    def _intervals(self, generation: _Generation) -> TokenIntervals:
        """Return the seconds that a client saw between its tokens."""
        return TokenIntervals.after_gap(generation.gap_s, self._log[generation.log_start :])

    def check(self) -> None:
        """Audit: the batch, and that all that runs is known."""
        self.batch.check()
        self.local.check()
        self.answers.check()
        assert len(self._generations) == self.batch.n_running
