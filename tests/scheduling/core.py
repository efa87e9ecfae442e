"""A conductor that tests drive by hand; its books are audited after every event."""

from collections.abc import Sequence
from typing import Any, TypeVar

from halfmoon_protocol.ids import BlockHash, RequestId, WorkerId
from halfmoon_protocol.kv_events import BlockStored, KvEventBatch
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    DecodeFailed,
    DecodeLoad,
    DecodeRefused,
    DecodeReserved,
    PrefillDone,
    PrefillFailed,
    PrefillLoad,
    PrefillStopped,
    ReserveDecode,
    ToConductor,
    ToWorker,
)
from halfmoon_scheduling.commands import AnyCommand, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from halfmoon_scheduling.placement.estimates import Placement
from halfmoon_scheduling.requests.request_state import Phase
from halfmoon_testing.scheduling_inputs import a_landing, a_request, a_worker

R1, R2 = RequestId("cmpl-1"), RequestId("cmpl-2")
P0, P1, P2, D0, D1, K0, K1, K2 = (
    WorkerId(f"{role}-{i}")
    for role, n in (("prefill", 3), ("decode", 2), ("kvstore", 3))
    for i in range(n)
)
T = TypeVar("T", bound=AnyCommand)


def decode_load(free_pages: int = 64, **fields: Any) -> DecodeLoad:
    """Return a decode worker's report: idle, with 64 pages, unless said otherwise."""
    idle = {"n_running": 0, "n_reserved": 0, "context_tokens": 0, "n_pages": 64, "step_s": 0.0}
    return DecodeLoad(free_pages=free_pages, **(idle | fields))


def prefill_load(queued_tokens: int, n_queued: int = 1) -> PrefillLoad:
    """Return a prefill worker's report of its queue."""
    return PrefillLoad(n_queued=n_queued, queued_tokens=queued_tokens, free_pages=9, n_pages=9)


def prefill_done(rid: str, finish: Any = "", **more: Any) -> PrefillDone:
    """Return the end of a prefill whose first token is 7."""
    plain = {"n_cached": 0, "queue_s": 0.0, "compute_s": 0.01, "drain_s": 0.0}
    return PrefillDone(request_id=RequestId(rid), first_token=7, finish=finish, **(plain | more))


def kv_stored(hashes: Sequence[BlockHash], sequence: int = 0) -> KvEventBatch:
    """Return what a kvstore says when it has stored these blocks."""
    stored = BlockStored(
        block_hashes=tuple(hashes), parent_block_hash=None, token_ids=(), block_size=16
    )
    return KvEventBatch(sequence, 0.0, (stored,))


class Core:
    """A conductor and the workers that join it."""

    def __init__(self, *workers: str, **config: Any) -> None:
        self.conductor = Conductor(SchedulingConfig(**config))
        self.now = 0.0
        for worker in workers:
            self.join(worker)

    def handle(self, event: AnyEvent, now: float | None = None) -> list[AnyCommand]:
        self.now = self.now if now is None else now
        commands = self.conductor.handle(event, self.now)
        self.conductor.check()
        return commands

    # -- workers -----------------------------------------------------------------------------

    def join(self, worker: str, **fields: Any) -> list[AnyCommand]:
        return self.handle(WorkerJoined(a_worker(worker, **fields)))

    def lose(self, worker: str) -> list[AnyCommand]:
        return self.handle(WorkerLost(WorkerId(worker), "socket closed"))

    def hear(self, worker: str, message: ToConductor) -> list[AnyCommand]:
        return self.handle(MessageReceived(WorkerId(worker), message))

    def load(self, worker: str = "decode-0", free_pages: int = 64, **more: Any) -> list[AnyCommand]:
        return self.hear(worker, decode_load(free_pages, **more))

    def hold(self, kvstore: str, request: Request, n_blocks: int) -> None:
        """The kvstore says that it holds the first blocks of this prompt."""
        hashes = request.block_hashes[:n_blocks]
        assert self.hear(kvstore, BlocksSnapshot(sequence=-1, hashes=hashes)) == []

    # -- requests ----------------------------------------------------------------------------

    def arrive(self, request: Request | str = "cmpl-1", **fields: Any) -> list[AnyCommand]:
        request = a_request(request, **fields) if isinstance(request, str) else request
        return self.handle(RequestArrived(request))

    def cancel(self, rid: str = "cmpl-1") -> list[AnyCommand]:
        return self.handle(RequestCancelled(RequestId(rid)))

    def finish(self, rid: str = "cmpl-1", n_new: int = 8) -> list[AnyCommand]:
        return self.handle(RequestFinished(RequestId(rid), n_new))

    def tick(self, now: float | None = None) -> list[AnyCommand]:
        return self.handle(Tick(), now)

    def reserved(
        self, worker: str = "decode-0", rid: str = "cmpl-1", expires_s: float = 60.0, **more: Any
    ) -> list[AnyCommand]:
        more = {"landing": a_landing(worker)} | more
        return self.hear(
            worker, DecodeReserved(request_id=RequestId(rid), expires_s=expires_s, **more)
        )

    def refused(
        self, worker: str = "decode-0", rid: str = "cmpl-1", retryable: bool = True, **more: Any
    ) -> list[AnyCommand]:
        more = {"reason": "0 of 64 pages are free"} | more
        return self.hear(
            worker, DecodeRefused(request_id=RequestId(rid), retryable=retryable, **more)
        )

    def prefilled(
        self, worker: str = "prefill-0", rid: str = "cmpl-1", finish: Any = "", **more: Any
    ) -> list[AnyCommand]:
        return self.hear(worker, prefill_done(rid, finish, **more))

    def prefill_failed(
        self, worker: str = "prefill-0", rid: str = "cmpl-1", retryable: bool = True, **more: Any
    ) -> list[AnyCommand]:
        more = {"reason": "out of memory"} | more
        return self.hear(
            worker, PrefillFailed(request_id=RequestId(rid), retryable=retryable, **more)
        )

    def prefill_stopped(
        self, worker: str = "prefill-0", rid: str = "cmpl-1", **more: Any
    ) -> list[AnyCommand]:
        return self.hear(worker, PrefillStopped(request_id=RequestId(rid), **more))

    def decode_failed(
        self, worker: str = "decode-0", rid: str = "cmpl-1", reason: str = "preempted", **more: Any
    ) -> list[AnyCommand]:
        failed = DecodeFailed(request_id=RequestId(rid), reason=reason, retryable=True, **more)
        return self.hear(worker, failed)

    def run(self, request: Request | str = "cmpl-1", **fields: Any) -> list[AnyCommand]:
        """A request arrives, gets its pages and is prefilled; what follows from that."""
        rid = request if isinstance(request, str) else request.request_id
        self.arrive(request, **fields)
        self.reserved(rid=rid)
        return self.prefilled(rid=rid)

    # -- what can be seen --------------------------------------------------------------------

    def phase(self, rid: str = "cmpl-1") -> Phase | None:
        return self.conductor.phase_of(RequestId(rid))

    @property
    def n_requests(self) -> dict[str, int]:
        counts = {phase: n for phase, n in self.conductor.n_requests.items() if n}
        assert self.conductor.is_idle == (not counts)
        return counts

    @property
    def decision(self) -> Decision:
        return self.conductor.decisions[-1]

    @property
    def placement(self) -> Placement:
        return self.decision.placement

    @property
    def chosen(self) -> Any:
        return self.placement.chosen


def sent(commands: list[AnyCommand]) -> list[tuple[WorkerId, type[ToWorker]]]:
    """Return who is sent which kinds of messages."""
    return [(c.worker_id, type(c.message)) for c in commands if isinstance(c, Send)]


def only(commands: list[AnyCommand], kind: type[T]) -> T:
    """Return the single command, which is of this kind."""
    (command,) = commands
    assert isinstance(command, kind), command
    return command


def message_to(commands: list[AnyCommand], worker: str) -> Any:
    """Return the single message to a worker."""
    (message,) = (c.message for c in commands if isinstance(c, Send) and c.worker_id == worker)
    return message


def asked(commands: list[AnyCommand]) -> dict[str, WorkerId]:
    """Return the requests for which pages are asked for, in their order, and of which worker."""
    return {
        c.message.request_id: c.worker_id
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, ReserveDecode)
    }


def resubmitted(commands: list[AnyCommand]) -> list[RequestId]:
    """Return the requests that are to be placed again."""
    return [c.request_id for c in commands if isinstance(c, Resubmit)]
