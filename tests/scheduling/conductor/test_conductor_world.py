"""The conductor in a small world of workers, where messages are late, doubled and lost.

The workers are fakes with a real `DecodeBatch` in them; each has a wire in either direction
that keeps its order, as ZeroMQ's do. Workers die at any moment and come back as another
generation, before or after the conductor has noticed.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId, original_request_id, retry_id
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    Cancel,
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    PrefillFailed,
    PrefillStopped,
    Produced,
    ReserveDecode,
    SnapshotBlocks,
    Stage,
    StartDecode,
    StartPrefill,
    ToConductor,
    TokensProduced,
    ToWorker,
    WorkerInfo,
)
from halfmoon_scheduling.admission.loss_history import MAX_EXCUSES
from halfmoon_scheduling.admission_modes import ADMISSION_MODES
from halfmoon_scheduling.commands import (
    AnyCommand,
    Deliver,
    Fail,
    RefuseWorker,
    Reject,
    Resubmit,
    Send,
)
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.decode.decode_batch import DecodeBatch, ReservationRefused
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_scheduling.events import (
    AnyEvent,
    Casualty,
    KvChanged,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestProgressed,
    Tick,
    WorkerJoined,
    WorkerLost,
    with_casualty,
)
from halfmoon_scheduling.placement.modes import PLACEMENT_MODES
from halfmoon_testing.scheduling_inputs import a_landing, a_request, a_worker
from tests.scheduling.core import decode_load, kv_stored, prefill_done, prefill_load
from tests.scheduling.models import model_test

NAMES = ["prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0", "kvstore-1"]
N_PAGES = 12
LANDING_S = 20.0


@dataclass
class Worker:
    """One start of a worker process."""

    info: WorkerInfo
    #: What the conductor sent and the worker has not read.
    inbox: deque[ToWorker] = field(default_factory=deque)
    #: What the worker sent and the conductor has not read.
    outbox: deque[ToConductor | KvEventBatch] = field(default_factory=deque)
    # A prefill worker's queue, and until when it may write for each.
    queue: dict[RequestId, StartPrefill] = field(default_factory=dict)
    may_write_until_s: dict[RequestId, float] = field(default_factory=dict)
    # A decode worker's batch.
    batch: DecodeBatch | None = None
    pages: dict[RequestId, set[int]] = field(default_factory=dict)
    # A kvstore's blocks.
    blocks: set[BlockHash] = field(default_factory=set)
    sequence: int = -1

    def read(self, now: float) -> None:
        message = self.inbox.popleft()
        match message:
            case ReserveDecode():
                self._reserve(message, now)
            case StartDecode():
                assert self.batch is not None
                try:
                    self.batch.start(message.request_id, message.first_token, now)
                except KeyError as error:
                    self._fail_decode(message.request_id, str(error))
            case Cancel() if self.batch is not None:
                self.queue.pop(message.request_id, None)
                aside_until_s = now + 2.0 if message.landing_in_doubt else None
                self.batch.cancel(message.request_id, aside_until_s=aside_until_s)
            case Cancel():
                self.queue.pop(message.request_id, None)
                self.outbox.append(PrefillStopped(request_id=message.request_id))
            case StartPrefill():
                self.queue[message.request_id] = message
            case SnapshotBlocks():
                snapshot = BlocksSnapshot(sequence=self.sequence, hashes=tuple(sorted(self.blocks)))
                self.outbox.append(snapshot)
            case _:
                raise AssertionError(f"{self.info.worker_id} was sent a {message}")

    def _reserve(self, message: ReserveDecode, now: float) -> None:
        assert self.batch is not None
        try:
            pages = self.batch.reserve(message.request_id, message.n_tokens, message.stopping, now)
        except ReservationRefused as refusal:
            why = {"reason": refusal.reason, "retryable": refusal.retryable}
            self.outbox.append(DecodeRefused(request_id=message.request_id, **why))  # type: ignore[arg-type]
            return
        self.pages[message.request_id] = set(pages)
        landing = a_landing(self.info.worker_id, tuple(pages), generation=self.info.generation)
        self.outbox.append(
            DecodeReserved(request_id=message.request_id, landing=landing, expires_s=LANDING_S)
        )

    def _fail_decode(self, request_id: RequestId, reason: str) -> None:
        self.outbox.append(DecodeFailed(request_id=request_id, reason=reason, retryable=True))

    def fail_prefill(
        self, rid: RequestId, reason: str, retryable: bool = True, culprit: str | None = None
    ) -> None:
        blamed = None if culprit is None else WorkerId(culprit)
        self.outbox.append(
            PrefillFailed(request_id=rid, reason=reason, retryable=retryable, culprit=blamed)
        )

    def step(self, now: float) -> None:
        """One decode step, after the landings that ran out."""
        assert self.batch is not None
        for request_id in self.batch.expire(now):
            self._fail_decode(request_id, "the landing ran out")
        step = self.batch.next_step()
        for row in step.rows:
            self.pages[row.request_id] = set(row.pages)
        for request_id in step.preempted:
            self._fail_decode(request_id, "preempted")
        produced = tuple(
            Produced(row.request_id, 1, self.batch.on_token(row.request_id, 1)) for row in step.rows
        )
        if produced:
            self.outbox.append(TokensProduced(step=0, produced=produced))

    def load(self) -> ToConductor:
        if self.batch is None:
            n_tokens = sum(len(start.token_ids) for start in self.queue.values())
            return prefill_load(n_tokens, len(self.queue))
        names = "n_running", "n_reserved", "context_tokens", "free_pages"
        counts = {name: getattr(self.batch, name) for name in names}
        return decode_load(n_pages=N_PAGES, step_s=0.01, **counts)


class World(RuleBasedStateMachine):
    """Everything that can happen, in any order; see the assertions in `act`."""

    @initialize(
        placement=st.sampled_from(list(PLACEMENT_MODES)),
        admission=st.sampled_from(list(ADMISSION_MODES)),
        double_check=st.booleans(),
        max_deferred=st.sampled_from([0, 2]),
        absent=st.sets(st.sampled_from(NAMES), max_size=3),
        grouped=st.booleans(),
        local=st.booleans(),
        served=st.sampled_from([False, False, True]),
    )
    def begin(
        self,
        placement: str,
        admission: str,
        double_check: bool,
        max_deferred: int,
        absent: set[str],
        grouped: bool,
        local: bool,
        served: bool,
    ) -> None:
        self.grouped, self.local, self.served = grouped, local, served
        self.config = SchedulingConfig(
            placement=placement,
            admission=admission,
            double_check=double_check,
            max_deferred=max_deferred,
            defer_s=3.0,
            ttft_slo_s=5.0,
            tbt_slo_s=0.0115,  # one request a step
            group_least_gain=1.0,
            max_waiting=4,
            admission_quantile=0.9 if double_check else 0.0,
            max_queued_requests=12,
            max_queue_s=20.0,
            max_attempts=3,
            request_timeout_s=30.0,
        )
        self.conductor = Conductor(self.config)
        self.now = 0.0
        self.journal: list[tuple[AnyEvent, float, list[AnyCommand]]] = []
        self.workers: dict[WorkerId, Worker] = {}
        self.generation = 0
        #: Workers as the conductor was told of them.
        self.known: dict[WorkerId, int] = {}
        #: Workers that died while the conductor believes in that generation of them.
        self.unnoticed: list[tuple[WorkerId, int]] = []
        self.requests: dict[RequestId, Request] = {}
        #: How each request ended, for those that did.
        self.ended: dict[RequestId, str] = {}
        self.granted: set[RequestId] = set()
        self.started: set[RequestId] = set()
        self.to_resubmit: list[RequestId] = []
        #: Of each client's request, the workers lost under it since decode made a token of it.
        self.casualties: dict[str, tuple[Casualty, ...]] = {}
        self.progressed: set[RequestId] = set()
        #: Tries that delivered a token.
        self.fruitful: set[RequestId] = set()
        #: Tries that do not count among those without a token.
        self.uncounted: set[RequestId] = set()
        self.heard: list[tuple[WorkerId, int, ToConductor]] = []
        self.n_clients = 0
        #: What prefill workers that nobody hears any more still write, and until when.
        self.cut_off: list[tuple[StartPrefill, float]] = []
        #: Deaths and cuts yet to come: endless ones would leave nothing else to see.
        self.bad_luck = 4
        for name in NAMES:
            if name not in absent:
                self.a_worker_comes(name, False)

    # -- the wire between world and conductor -----------------------------------------------

    def tell(self, event: AnyEvent) -> None:
        commands = self.conductor.handle(event, self.now)
        self.journal.append((event, self.now, commands))
        for command in commands:
            self.act(command)
        self.conductor.check()

    def act(self, command: AnyCommand) -> None:
        match command:
            case Send():
                assert command.worker_id in self.known, f"{command} to a worker that is lost"
                if isinstance(command.message, StartPrefill):
                    rid = command.message.request_id
                    assert rid in self.granted, f"{rid} is prefilled before decode has room"
                    assert rid not in self.started, f"{rid} is prefilled twice"
                    assert rid not in self.ended
                    self.started.add(rid)
                    lost = self.casualties.get(original_request_id(rid), ())
                    n_alone = sum(casualty.alone for casualty in lost)
                    assert n_alone <= MAX_EXCUSES, f"{rid} took down {lost}"
                    if self.served:
                        self.stays_at_one_server(command.worker_id, command.message)
                worker = self.workers.get(command.worker_id)
                if worker is not None and worker.info.generation == self.known[command.worker_id]:
                    worker.inbox.append(command.message)
                    if isinstance(command.message, StartPrefill):
                        until_s = self.now + command.message.landing_expires_s
                        worker.may_write_until_s[command.message.request_id] = until_s
            case Deliver():
                assert command.request_id not in self.ended, f"{command} after its end"
                self.fruitful.add(command.request_id)
                if command.finish:
                    self.end(command.request_id, "delivered")
            case Reject():
                late = self.config.double_check or self.config.admission == "baseline"
                assert late or command.request_id not in self.started, f"{command} is late"
                assert command.request_id not in self.fruitful
                assert command.reason
                if command.kind != "too_long":
                    assert command.retry_after_s > 0
                self.end(command.request_id, "rejected")
            case Fail():
                self.end(command.request_id, "failed")
            case Resubmit():
                assert self.requests[command.request_id].fruitless < self.config.max_attempts
                self.end(command.request_id, "resubmitted")
                if command.casualty is not None:
                    known = self.casualties.get(original_request_id(command.request_id), ())
                    known = with_casualty(known, command.casualty)
                    self.casualties[original_request_id(command.request_id)] = known
                if not command.counts:
                    self.uncounted.add(command.request_id)
                self.to_resubmit.append(command.request_id)
            case RefuseWorker():
                raise AssertionError(f"{command}: they are all alike here")

    def stays_at_one_server(self, prefill: WorkerId, start: StartPrefill) -> None:
        """A server's KV can't leave it: nothing is fetched, and its own decode worker goes on."""
        assert start.landing.region.segment[-1] == prefill[-1], "decode is at another server"
        assert start.cached is None and start.store_in is None and not start.stages

    def end(self, request_id: RequestId, how: str) -> None:
        assert request_id not in self.ended, f"{request_id}: {how} after {self.ended[request_id]}"
        self.ended[request_id] = how

    # -- clients -----------------------------------------------------------------------------

    @rule(
        n_tokens=st.sampled_from([1, 16, 17, 60, 60, 100, 250]),
        prompt=st.integers(0, 1),
        max_new=st.sampled_from([1, 2, 5, 40]),
        twice=st.booleans(),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from(["", "", "", "lab", "shop"]),
        defer_s=st.sampled_from([None, 0.0, 20.0]),
    )
    def a_request_arrives(
        self,
        n_tokens: int,
        prompt: int,
        max_new: int,
        twice: bool,
        priority: int,
        tenant: str,
        defer_s: float | None,
    ) -> None:
        self.n_clients += 1
        rules: dict[str, Any] = {"priority": priority, "tenant": tenant, "defer_s": defer_s}
        rules |= {"n_tokens": n_tokens, "prompt": prompt, "max_new_tokens": max_new}
        request = a_request(f"cmpl-{self.n_clients}", **rules)
        self.requests[request.request_id] = request
        self.tell(RequestArrived(request))
        if twice and request.request_id not in self.ended:
            self.tell(RequestArrived(request))

    @precondition(lambda self: self.to_resubmit)
    @rule()
    def a_request_is_resubmitted(self) -> None:
        before = self.requests[self.to_resubmit.pop(0)]
        attempt = before.attempt + 1
        rid = retry_id(before.request_id, attempt)
        request = msgspec.structs.replace(
            before,
            request_id=rid,
            attempt=attempt,
            fruitless=before.fruitless + (before.request_id not in self.uncounted),
            casualties=self.casualties.get(original_request_id(rid), ()),
        )
        if before.request_id in self.fruitful:  # it goes on behind what was delivered
            left = before.stopping.max_new_tokens - 1
            request = msgspec.structs.replace(
                request,
                fruitless=0,
                token_ids=(*before.token_ids, 1),
                stopping=msgspec.structs.replace(before.stopping, max_new_tokens=left),
            )
        self.requests[rid] = request
        self.tell(RequestArrived(request))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_client_goes(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)), "gone")
        if rid in self.to_resubmit:
            self.to_resubmit.remove(rid)
            self.ended[rid] = "cancelled"
        if rid not in self.ended:
            self.end(rid, "cancelled")
        self.tell(RequestCancelled(rid))

    # -- workers -----------------------------------------------------------------------------

    def of_role(self, role: str) -> list[Worker]:
        return [w for _, w in sorted(self.workers.items()) if w.info.role == role]

    @precondition(lambda self: self.moving())
    @rule(data=st.data(), n=st.integers(1, 15))
    def messages_travel(self, data: st.DataObject, n: int) -> None:
        """Some wires move on by a message each; every wire keeps its order."""
        for _ in range(n):
            if not (moving := self.moving()):
                break
            worker_id, way = data.draw(st.sampled_from(moving), "wire")
            if way == "to the worker":
                self.workers[worker_id].read(self.now)
            else:
                self.read_from(worker_id)

    def moving(self) -> list[tuple[WorkerId, str]]:
        return [
            (worker_id, way)
            for worker_id, worker in sorted(self.workers.items())
            for way, wire in (("to the worker", worker.inbox), ("from it", worker.outbox))
            if wire
        ]

    def read_from(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        message = worker.outbox.popleft()
        if self.known.get(worker_id) != worker.info.generation:
            return  # nobody is connected to this start of it
        if isinstance(message, KvEventBatch):
            self.tell(KvChanged(worker_id, message))
            return
        self.heard.append((worker_id, worker.info.generation, message))
        self.hear(worker_id, message)

    def hear(self, worker_id: WorkerId, message: ToConductor) -> None:
        if isinstance(message, DecodeReserved):
            self.granted.add(message.request_id)
        if not isinstance(message, TokensProduced):
            self.tell(MessageReceived(worker_id, message))
            return
        for produced in message.produced:  # the gateway's part
            rid = produced.request_id
            if rid not in self.ended and rid not in self.progressed:
                self.progressed.add(rid)
                if self.casualties.pop(original_request_id(rid), ()):
                    self.tell(RequestProgressed(rid))
            if produced.finish and produced.request_id not in self.ended:
                self.end(produced.request_id, "finished")
                self.tell(RequestFinished(produced.request_id, 2))

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def an_old_message_is_heard_again(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.heard) - 1), "old message")
        worker_id, generation, message = self.heard[i]
        # A doubled grant would hold pages that no worker holds; connections end with their
        # workers, so only the present start of a worker is heard twice.
        if self.known.get(worker_id) == generation:
            self.hear(worker_id, message)

    @rule(name=st.sampled_from(NAMES), draining=st.sampled_from([False, False, False, True]))
    def a_worker_comes(self, name: str, draining: bool) -> None:
        """It is new, or back as another generation, or it says something new of itself."""
        worker_id = WorkerId(name)
        if worker_id not in self.workers:
            self.generation += 1
            stage = None
            if self.grouped and name.startswith("prefill"):
                stage = Stage("both", int(name[-1]), 2, chunk_tokens=16)
            info = a_worker(
                name,
                generation=self.generation,
                n_blocks=N_PAGES,
                host="host",
                stage=stage,
                local_prefill_tokens=20 if self.local and name.startswith("decode") else 0,
                local_prefill_step_s=0.05 * (self.generation % 2),
                server=f"server-{name[-1]}" if self.served else "",
            )
            batch = None
            if info.role == "decode":
                sizes = {"block_size": 16, "max_running": 3, "max_context": 4096}
                batch = DecodeBatch(PageAllocator(N_PAGES), landing_ttl_s=LANDING_S, **sizes)
            self.workers[worker_id] = Worker(info, batch=batch)
            draining = False
        worker = self.workers[worker_id]
        worker.info = msgspec.structs.replace(worker.info, draining=draining)
        # The conductor knows it before it sends to it.
        generation_before = self.known.get(worker_id)
        self.known[worker_id] = worker.info.generation
        if generation_before != worker.info.generation:
            self.unnoticed = [(w, g) for w, g in self.unnoticed if w != worker_id]
        self.tell(WorkerJoined(worker.info))

    @precondition(lambda self: self.workers and self.bad_luck)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        self.bad_luck -= 1
        worker_id = data.draw(st.sampled_from(sorted(self.workers)), "dead")
        generation = self.workers.pop(worker_id).info.generation
        if self.known.get(worker_id) == generation:
            self.unnoticed.append((worker_id, generation))

    @precondition(lambda self: self.unnoticed)
    @rule()
    def a_death_is_noticed(self) -> None:
        worker_id, generation = self.unnoticed.pop(0)
        if self.known.get(worker_id) == generation:
            del self.known[worker_id]
            self.tell(WorkerLost(worker_id, "its lease ran out"))

    @precondition(lambda self: self.known and self.bad_luck)
    @rule(data=st.data())
    def a_connection_breaks(self, data: st.DataObject) -> None:
        """What was on its wires is gone, and the worker starts again from nothing."""
        self.bad_luck -= 1
        worker_id = data.draw(st.sampled_from(sorted(self.known)), "cut off")
        del self.known[worker_id]
        if (worker := self.workers.pop(worker_id, None)) is not None:
            self.cut_off += [
                (start, worker.may_write_until_s[rid]) for rid, start in worker.queue.items()
            ]
            # As a further stage it writes what the first one was told.
            self.cut_off += [
                (start, head.may_write_until_s[rid])
                for head in list(self.workers.values())
                for rid, start in head.queue.items()
                if any(stage.worker_id == worker_id for stage in start.stages)
            ]
        self.unnoticed = [(w, g) for w, g in self.unnoticed if w != worker_id]
        self.tell(WorkerLost(worker_id, "connection reset"))

    @precondition(lambda self: any(w.queue for w in self.workers.values()))
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["", "", "", "stop", "fails", "is hopeless"]),
        culprit=st.sampled_from([None, *NAMES]),
    )
    def a_prefill_ends(self, data: st.DataObject, outcome: str, culprit: str | None) -> None:
        busy = [worker_id for worker_id, w in sorted(self.workers.items()) if w.queue]
        self.end_prefill(data.draw(st.sampled_from(busy), "worker"), outcome, culprit)

    def end_prefill(self, worker_id: WorkerId, outcome: str, culprit: str | None = None) -> None:
        worker = self.workers[worker_id]
        rid = next(iter(worker.queue))
        start = worker.queue.pop(rid)
        if outcome in ("fails", "is hopeless"):
            worker.fail_prefill(rid, f"it {outcome}", outcome == "fails", culprit)
            return
        if worker.may_write_until_s[rid] <= self.now:
            worker.fail_prefill(rid, "the landing ran out")
            return
        self.write(start)
        if start.stopping.max_new_tokens == 1:
            outcome = "length"
        n_cached = 16 * start.cached.n_blocks if start.cached else 0
        assert n_cached < len(start.token_ids)
        worker.outbox.append(prefill_done(rid, outcome, n_cached=n_cached, compute_s=0.02))
        kept_at = None if start.store_in is None else start.store_in.worker_id
        if self.served:  # a server keeps what it computes, without being told
            kept_at = WorkerId(f"kvstore-{worker_id[-1]}")
        if kept_at is not None and kept_at in self.workers:
            kvstore = self.workers[kept_at]
            kvstore.blocks |= set(start.block_hashes)
            kvstore.sequence += 1
            kvstore.outbox.append(kv_stored(start.block_hashes, kvstore.sequence))

    def write(self, start: StartPrefill) -> None:
        """KV bytes land; pages that are another request's by now would be spoilt."""
        region = start.landing.region
        decode = self.workers.get(WorkerId(region.segment))
        if decode is None or decode.info.generation != region.generation:
            return
        assert decode.batch is not None
        for rid, pages in decode.pages.items():
            if rid != start.request_id and rid in decode.batch:
                assert not pages & set(start.landing.pages), f"{start.request_id} spoils {rid}"

    @precondition(lambda self: self.cut_off)
    @rule()
    def a_prefill_worker_cut_off_still_writes(self) -> None:
        start, until_s = self.cut_off.pop(0)
        if self.now < until_s:
            self.write(start)

    @precondition(lambda self: self.of_role("decode"))
    @rule(data=st.data())
    def a_decode_worker_steps(self, data: st.DataObject) -> None:
        workers = [w.info.worker_id for w in self.of_role("decode")]
        self.workers[data.draw(st.sampled_from(workers), "worker")].step(self.now)

    @precondition(lambda self: self.of_role("decode") or self.of_role("prefill"))
    @rule(data=st.data())
    def a_load_is_published(self, data: st.DataObject) -> None:
        workers = [w.info.worker_id for w in self.of_role("decode") + self.of_role("prefill")]
        worker = self.workers[data.draw(st.sampled_from(workers), "worker")]
        worker.outbox.append(worker.load())

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    # -- what holds always, and at the end ---------------------------------------------------

    @invariant()
    def requests_are_known_exactly_until_they_end(self) -> None:
        if not hasattr(self, "conductor"):
            return
        for rid in self.requests:
            assert (self.conductor.phase_of(rid) is None) == (rid in self.ended), rid
        for worker in self.of_role("decode"):
            assert worker.batch is not None
            worker.batch.check()

    def teardown(self) -> None:
        """With no more bad luck everything ends, and then nothing is held."""
        if not hasattr(self, "conductor"):
            return
        while self.unnoticed:
            self.a_death_is_noticed()
        for name in sorted(self.workers):
            if self.known.get(name) is None:
                self.a_worker_comes(name, False)
        # A round makes a token of each that runs: at worst of one, and each of its tries anew.
        unanswered = self.requests.keys() - self.ended.keys() | set(self.to_resubmit)
        n_tokens = sum(self.requests[rid].stopping.max_new_tokens for rid in unanswered)
        for _ in range(80 + self.config.max_attempts * n_tokens):
            self.run_a_while()
            if len(self.ended) == len(self.requests) and not self.to_resubmit:
                break
        assert set(self.requests) == set(self.ended)
        for _ in range(10):
            self.run_a_while()
        assert not any(self.conductor.n_requests.values())
        for worker in self.of_role("decode"):
            assert worker.batch is not None
            assert worker.batch.free_pages == N_PAGES, "pages leaked"
        assert not self.conductor.cluster.transfers
        answered = {
            original_request_id(rid) for rid, how in self.ended.items() if how != "resubmitted"
        }
        assert answered >= {original_request_id(rid) for rid in self.requests}
        self.replay()

    def run_a_while(self) -> None:
        for worker_id in sorted(self.workers):
            worker = self.workers[worker_id]
            while worker.inbox:
                worker.read(self.now)
            while worker.queue:
                self.end_prefill(worker_id, "")
            if worker.batch is not None:
                worker.step(self.now)
                worker.outbox.append(worker.load())
            while worker.outbox:
                self.read_from(worker_id)
        while self.to_resubmit:
            self.a_request_is_resubmitted()
        self.time_passes(2.5)

    def replay(self) -> None:
        """The same events at the same times give the same commands."""
        again = Conductor(self.config)
        for event, now, commands in self.journal:
            assert again.handle(event, now) == commands


TestWorld = model_test(World, at_night=300, steps_at_night=60)
