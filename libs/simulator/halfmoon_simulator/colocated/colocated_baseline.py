"""Simulate the baseline: prefill and decode on one instance, as stock engines batch.

Two ways of batching, both of vLLM:

- Without chunks, waiting prompts are prefilled whole before the next decode step. All running
  requests wait meanwhile.
- With chunks, each pass takes a token from every running request. Prompts fill the rest of a
  token budget.

Prefix caching keeps the KV of finished prompts in the instance's own pages until another request
needs them. Out of pages, the youngest request is preempted and prefilled again later.

A balancer sends each request to the instance with the fewest requests, the first among equals.
Router `kv` is that of NVIDIA Dynamo (lib/kv-router, default weights): the least sum of prompt
blocks that wait for computation, the request's uncached ones among them, and blocks in use.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.colocated.colocated_pool import PrefixCachingPool
from halfmoon_simulator.costs.cost_file import CostFile
from halfmoon_simulator.results.run_results import (
    ClusterSample,
    Progress,
    RunResult,
    SimRequestRecord,
)
from halfmoon_simulator.results.token_intervals import TokenIntervals
from halfmoon_simulator.workloads.traces import TraceRequest, with_sessions

ROUTERS = ("requests", "kv")


class ColocatedSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances and how they batch."""

    n_instances: int = 16
    block_tokens: int = 512
    prefix_caching: bool = False
    #: How a request's instance is chosen: a name in `ROUTERS`.
    router: str = "requests"
    #: Tokens of one pass in which prompts run along with decoding; None: prompts run alone.
    chunk_tokens: int | None = None
    #: Prompt tokens of one pass of prompts alone; a longer prompt runs by itself.
    max_batched_tokens: int = 8192
    max_running: int = 256
    n_pages: int | None = None
    sample_s: float = 5.0

    def __post_init__(self) -> None:
        """Check counts.

        Raises:
            ValueError: naming the field, the value and what is allowed.
        """
        for name in (
            "n_instances",
            "block_tokens",
            "chunk_tokens",
            "max_batched_tokens",
            "max_running",
            "n_pages",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, it is at least 1")
        if self.router not in ROUTERS:
            raise ValueError(f"router is {self.router!r}, it is one of: {', '.join(ROUTERS)}")
        if not self.sample_s > 0:
            raise ValueError(f"sample_s is {self.sample_s}, it must be more than 0")

    def pages(self, costs: CostFile) -> int:
        """Return the number of pages of one instance."""
        if self.n_pages is not None:
            return self.n_pages
        return max(1, costs.device_kv_bytes // costs.layout(self.block_tokens).block_bytes)


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request at an instance."""

    record: SimRequestRecord
    asked: TraceRequest
    pages: list[int] = field(default_factory=list)
    #: Tokens whose KV is there, and how many of those were when it got its pages.
    n_computed: int = 0
    n_found: int = 0
    #: When its newest token came.
    last_token_s: float = 0.0
    #: Where its part of the instance's log begins, once it has had a step.
    log_start: int = -1
    #: Whether the newest token came by a prefill: the next interval is not in the log.
    fresh: bool = False

    @property
    def n_tokens(self) -> int:
        """Tokens so far; the newest one's KV is computed by the next step."""
        return self.record.n_input + self.record.n_out


@dataclass(eq=False, slots=True)
class _Run:
    """Passes under way that differ only in how much context they read."""

    began_s: float
    n_steps: int
    first_step_s: float
    growth_s: float
    members: list[_Sequence]
    #: Prompt chunks that run along: (sequence, tokens); then there is one step.
    chunks: list[tuple[_Sequence, int]]

    def after_s(self, n: int) -> float:
        return n * self.first_step_s + self.growth_s * n * (n - 1) / 2


class ColocatedInstance:
    """One engine that does both."""

    def __init__(
        self, spec: ColocatedSpec, costs: CostFile, event_queue: EventQueue, world: "ColocatedSim"
    ) -> None:
        self._spec = spec
        self._costs = costs
        self._event_queue = event_queue
        self._world = world
        self.pool = PrefixCachingPool(spec.pages(costs), caching=spec.prefix_caching)
        self._waiting: deque[_Sequence] = deque()
        #: Partly prefilled, the first one in front; only with chunks.
        self._filling: list[_Sequence] = []
        #: In order of their first token.
        self._running: list[_Sequence] = []
        self._run: _Run | None = None
        self._version = 0
        self._log: list[tuple[int, float]] = []
        #: When the newest step of decoding ended: passes of prompts since then were a stall.
        self._last_step_s = 0.0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        self.computed_tokens = 0
        self.cached_tokens = 0

    @property
    def n_requests(self) -> int:
        """Requests here."""
        return len(self._waiting) + len(self._filling) + len(self._running)

    def router_cost(self, sequence: _Sequence) -> float:
        """Return the blocks to prefill here with this request, and the blocks in use."""
        size = self._spec.block_tokens
        to_compute = sum(s.n_tokens - self._matched_tokens(s) for s in (*self._waiting, sequence))
        to_compute += sum(s.n_tokens - s.n_computed for s in self._filling)
        here = (*self._waiting, *self._filling, *self._running, sequence)
        in_use = sum(s.n_tokens for s in here)
        return to_compute / size + in_use / size

    @property
    def n_running(self) -> int:
        """Requests that decode."""
        return len(self._running)

    @property
    def backlog_s(self) -> float:
        """Predicted seconds of prefills that wait."""
        return sum(self._costs.prefill_s(s.n_tokens) for s in self._waiting)

    @property
    def step_s(self) -> float:
        """Seconds of a step over what is running now."""
        if not self._running:
            return 0.0
        return self._costs.step_s(len(self._running), sum(s.n_tokens for s in self._running))

    def fits(self, sequence: _Sequence) -> bool:
        """Return whether its whole context fits an empty instance."""
        longest = sequence.record.n_input + sequence.record.n_output
        return -(-longest // self._spec.block_tokens) <= self.pool.pages.n_pages

    def arrive(self, sequence: _Sequence) -> None:
        """Accept a request that fits."""
        self._waiting.append(sequence)
        if self._run is None:
            self._begin()
        elif not self._run.chunks and self._may_admit(sequence):
            self._cut()

    # -- passes ------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Let a run of steps end with the one under way."""
        run = self._run
        assert run is not None
        elapsed_s = self._event_queue.now - run.began_s
        n = max(1, min(run.n_steps, int(elapsed_s / run.first_step_s)))
        while n > 1 and run.after_s(n - 1) >= elapsed_s:
            n -= 1
        while n < run.n_steps and run.after_s(n) < elapsed_s:
            n += 1
        if n < run.n_steps:
            run.n_steps = n
            self._plan_end(run)

    def _plan_end(self, run: _Run) -> None:
        self._version += 1
        self._event_queue.at(run.began_s + run.after_s(run.n_steps), self._on_end, self._version)

    def _begin(self) -> None:
        if self._spec.chunk_tokens is None:
            prompts = self._admit(self._spec.max_batched_tokens, whole=True)
            if prompts:
                self._start_run([], prompts)
                return
            self._grow()
        else:
            self._grow()
            budget = self._spec.chunk_tokens - len(self._running)
            prompts = self._admit(budget, whole=False)
        if self._running or prompts:
            self._start_run(list(self._running), prompts)

    def _start_run(self, members: list[_Sequence], prompts: list[tuple[_Sequence, int]]) -> None:
        seconds, growth_s, n_steps = self._costs.pass_s, 0.0, 1
        if members:
            n = len(members)
            seconds = self._costs.step_s(n, sum(s.n_tokens for s in members))
            if prompts:  # one pass: what each pass takes is taken once
                seconds += self._costs.pass_s - self._costs.shared_pass_s
            else:
                growth_s = self._costs.context_step_s(n) * n
                n_steps = max(1, min(self._quiet_steps(s) for s in members))
        for sequence, n_chunk in prompts:
            start = sequence.n_computed
            first = start == sequence.n_found
            seconds += self._costs.chunk_s(start, start + n_chunk, first=first)
        self._run = _Run(self._event_queue.now, n_steps, seconds, growth_s, members, prompts)
        self._plan_end(self._run)

    def _quiet_steps(self, sequence: _Sequence) -> int:
        """Steps until it ends or needs a page."""
        room = len(sequence.pages) * self._spec.block_tokens - sequence.n_tokens + 1
        return min(room, sequence.record.n_output - sequence.record.n_out)

    def _on_end(self, version: int) -> None:
        if version != self._version:
            return
        run = self._run
        assert run is not None
        self._run = None
        now = self._event_queue.now
        self.busy_s += now - run.began_s
        if run.members:
            self._stepped(run)
        for sequence, n_chunk in run.chunks:
            self._filled(sequence, n_chunk)
        if run.chunks and not run.members:
            self.prefill_s += now - run.began_s
        self._begin()

    def _stepped(self, run: _Run) -> None:
        now, n = self._event_queue.now, run.n_steps
        first_end_s = run.began_s + run.first_step_s
        entry = len(self._log)
        self._log.append((1, first_end_s - self._last_step_s))
        if n > 1:
            self._log.append((n - 1, (run.after_s(n) - run.first_step_s) / (n - 1)))
        self._last_step_s = now
        for sequence in run.members:
            if sequence.fresh:
                sequence.fresh = False
                sequence.log_start = entry + 1
                gap = TokenIntervals(((1, first_end_s - sequence.last_token_s),))
                self._extend(sequence.record, gap)
            sequence.record.n_out += n
            sequence.n_computed += n
            sequence.last_token_s = now
        for sequence in run.members:
            if sequence.record.n_out == sequence.record.n_output:
                self._running.remove(sequence)
                self._leave(sequence)
                self._world.end(sequence.record)

    def _filled(self, sequence: _Sequence, n_chunk: int) -> None:
        """Record a computed chunk of a prompt; the last one brings a token."""
        sequence.n_computed += n_chunk
        self.computed_tokens += n_chunk
        if sequence.n_computed < sequence.n_tokens:
            return
        self._filling.remove(sequence)
        record, now = sequence.record, self._event_queue.now
        full = record.n_input // self._spec.block_tokens
        self.pool.learn(sequence.asked.blocks[:full], sequence.pages[:full])
        if record.first_token_s is None:
            record.first_token_s = now
        else:
            self._extend(record, TokenIntervals(((1, now - sequence.last_token_s),)))
        record.n_out += 1
        sequence.last_token_s = now
        sequence.fresh = True
        if record.n_out == record.n_output:
            self._leave(sequence)
            self._world.end(record)
        else:
            self._running.append(sequence)

    # -- pages -------------------------------------------------------------------------------

    def _may_admit(self, sequence: _Sequence) -> bool:
        """Return whether its prompt fits now, with a spare page for each running request."""
        if len(self._running) + len(self._filling) >= self._spec.max_running:
            return False
        needed = -(-(sequence.n_tokens + 1) // self._spec.block_tokens)
        return needed + len(self._running) <= self.pool.n_available or not (
            self._running or self._filling
        )

    def _admit(self, budget: int, *, whole: bool) -> list[tuple[_Sequence, int]]:
        """Prompts for the next pass: whole ones, or chunks that fill a budget of tokens."""
        chosen: list[tuple[_Sequence, int]] = []
        for sequence in self._filling:
            n_chunk = min(budget, sequence.n_tokens - sequence.n_computed)
            if n_chunk > 0:
                chosen.append((sequence, n_chunk))
                budget -= n_chunk
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            left = sequence.n_tokens - self._matched_tokens(sequence)
            if not self._may_admit(sequence) or (whole and chosen and left > budget):
                break
            self._waiting.popleft()
            self._hold(sequence)
            left = sequence.n_tokens - sequence.n_computed
            n_chunk = left if whole else min(left, budget)
            chosen.append((sequence, n_chunk))
            self._filling.append(sequence)
            budget -= n_chunk
        return chosen

    def _matched(self, sequence: _Sequence) -> int:
        size = self._spec.block_tokens
        full = min(sequence.record.n_input, sequence.n_tokens - 1) // size
        return self.pool.match(sequence.asked.blocks[:full]) if self._spec.prefix_caching else 0

    def _matched_tokens(self, sequence: _Sequence) -> int:
        return self._matched(sequence) * self._spec.block_tokens

    def _hold(self, sequence: _Sequence) -> None:
        n_known = self._matched(sequence)
        pages = self.pool.reuse(sequence.asked.blocks[:n_known])
        needed = -(-(sequence.n_tokens + 1) // self._spec.block_tokens)
        sequence.pages = pages + self.pool.allocate(needed - n_known)
        sequence.n_computed = n_known * self._spec.block_tokens
        self.cached_tokens += sequence.n_computed
        sequence.n_found = sequence.n_computed
        if sequence.record.first_token_s is None:
            sequence.record.n_cached = sequence.n_computed

    def _grow(self) -> None:
        """Give a page to each running request that needs one; preempt the youngest for it."""
        size = self._spec.block_tokens
        for sequence in list(self._running):
            if sequence not in self._running:
                break
            while sequence.n_tokens > len(sequence.pages) * size:
                if self.pool.n_available:
                    sequence.pages += self.pool.allocate(1)
                    continue
                youngest = self._running.pop()
                self._leave(youngest)
                youngest.pages = []
                self._waiting.appendleft(youngest)
                if youngest is sequence:
                    break

    def _leave(self, sequence: _Sequence) -> None:
        """Give pages back, and write down what its client saw."""
        self.pool.release(sequence.pages)
        if sequence.log_start >= 0:
            self._extend(sequence.record, TokenIntervals(tuple(self._log[sequence.log_start :])))
            sequence.log_start = -1

    def _extend(self, record: SimRequestRecord, more: TokenIntervals) -> None:
        record.intervals = TokenIntervals((*record.intervals.runs, *more.runs))

    def check(self) -> None:
        """Audit: pages are held by requests and the cache alone."""
        self.pool.check()
        held: dict[int, int] = {}
        for sequence in (*self._running, *self._filling, *self._waiting):
            assert len(set(sequence.pages)) == len(sequence.pages)
            for page in sequence.pages:
                held[page] = held.get(page, 0) + 1
        for page in range(self.pool.pages.n_pages):
            holders = held.get(page, 0) + self.pool.knows(page)
            assert self.pool.pages.n_holders(page) == holders, f"page {page} leaks"


class ColocatedSim:
    """One run of one workload on coupled instances."""

    def __init__(
        self,
        spec: ColocatedSpec,
        costs: CostFile,
        workload: Sequence[TraceRequest],
        *,
        ttft_slo_s: float | None = None,
        tbt_slo_s: float | None = None,
    ) -> None:
        """Idle instances, with all arrivals ahead; the SLOs are only reported against."""
        self.spec = spec
        self.event_queue = EventQueue()
        self.instances = [
            ColocatedInstance(spec, costs, self.event_queue, self) for _ in range(spec.n_instances)
        ]
        self._workload = workload
        self._slos = (ttft_slo_s, tbt_slo_s)
        self.records: list[SimRequestRecord] = []
        self.samples: list[ClusterSample] = []
        self.n_over = 0
        self._turns: dict[str, list[int]] = {}
        for index, (asked, goes_on) in enumerate(with_sessions(workload)):
            if goes_on is not None:
                self._turns.setdefault(goes_on, []).insert(0, index)
            else:
                self.event_queue.at(asked.at_s, self._arrive, index)
        self.event_queue.at(0.0, self._sample)

    def _arrive(self, index: int) -> None:
        asked = self._workload[index]
        record = SimRequestRecord(
            index, self.event_queue.now, asked.n_input, asked.n_output, attempts=1
        )
        self.records.append(record)
        sequence = _Sequence(record, asked)
        chosen = min(range(len(self.instances)), key=lambda i: (self._load(i, sequence), i))
        record.prefill = record.decode = f"instance-{chosen}"
        if not self.instances[chosen].fits(sequence):
            self.end(record, "rejected")
            return
        self.instances[chosen].arrive(sequence)

    def _load(self, instance: int, sequence: _Sequence) -> float:
        if self.spec.router == "kv":
            return self.instances[instance].router_cost(sequence)
        return self.instances[instance].n_requests

    def end(self, record: SimRequestRecord, outcome: str = "finished") -> None:
        """End a request."""
        assert not record.outcome, "a request ends once"
        record.outcome, record.ended_s = outcome, self.event_queue.now
        self.n_over += 1
        session = self._workload[record.index].session
        if session is not None and (turns := self._turns.get(session)):
            index = turns.pop()
            self.event_queue.after(self._workload[index].at_s, self._arrive, index)

    def _sample(self) -> None:
        backlogs = [instance.backlog_s for instance in self.instances]
        steps = [instance.step_s for instance in self.instances]
        self.samples.append(
            ClusterSample(
                at_s=self.event_queue.now,
                prefill_backlog_s=sum(backlogs) / len(backlogs),
                prefill_backlog_max_s=max(backlogs),
                decode_step_s=sum(steps) / len(steps),
                decode_step_max_s=max(steps),
                n_running=sum(instance.n_running for instance in self.instances),
                n_ended=self.n_over,
                n_rejected=0,
                computed_tokens=sum(i.computed_tokens for i in self.instances),
                cached_tokens=sum(i.cached_tokens for i in self.instances),
            )
        )
        self.event_queue.after(self.spec.sample_s, self._sample)

    def step(self) -> bool:
        """Make one thing happen; False once every request has ended."""
        return self.n_over < len(self._workload) and self.event_queue.step()

    def run(self, progress: Progress | None = None) -> RunResult:
        """Go on until every request has ended."""
        n = 0
        while self.step():
            n += 1
            if progress is not None and n % 20_000 == 0:
                progress(self.event_queue.now, self.n_over, len(self._workload))
        ttft_slo_s, tbt_slo_s = self._slos
        return RunResult(
            records=self.records,
            samples=self.samples,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            prefill_busy_s=sum(i.prefill_s for i in self.instances),
            decode_busy_s=sum(i.busy_s - i.prefill_s for i in self.instances),
            n_prefill=self.spec.n_instances,
            n_decode=self.spec.n_instances,
            n_events=self.event_queue.n_processed,
        )

    def check(self) -> None:
        """Audit everything."""
        for instance in self.instances:
            instance.check()
        assert sum(bool(record.outcome) for record in self.records) == self.n_over
