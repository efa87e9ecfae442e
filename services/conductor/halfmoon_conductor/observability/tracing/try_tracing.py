"""The spans of tries, read from the facts and commands that pass between the core and its shell.

    generation ──▶ try ──▶ place       from arrival to a decode worker's being asked
                    │  └─▶ reserve     until it has set pages aside, or refused
                    ├────▶ prefill     the prefill worker's, told by `StartPrefill`
                    └────▶ decode      the decode worker's, told by `ReserveDecode`

The core knows nothing of it: it is watched from where a journal would be written. What a worker's
loss did is an event of the try that it ended; the next try is a span of its own.
"""

from dataclasses import dataclass, field

import msgspec

from halfmoon_conductor.workers.shell import WorkerPort
from halfmoon_protocol.ids import RequestId, WorkerId, original_request_id
from halfmoon_protocol.messages import (
    DecodeFailed,
    DecodeRefused,
    DecodeReserved,
    Message,
    PrefillDone,
    PrefillFailed,
    ReserveDecode,
    StartDecode,
    StartPrefill,
)
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.tracing import Attributes, Span
from halfmoon_scheduling.commands import AnyCommand, Deliver, Fail, Reject, Resubmit, Send
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.decision_log import Decision
from halfmoon_scheduling.events import (
    AnyEvent,
    MessageReceived,
    Request,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
)

#: Prefill workers whose estimates are shown beside the chosen one's.
_MAX_CANDIDATES = 8


@dataclass
class _Try:
    span: Span
    #: Running while it has no decode worker.
    place: Span | None
    #: Running while a decode worker is asked.
    reserve: Span | None = None


@dataclass
class _Generation:
    span: Span
    #: Tries by their ids; all but one are over.
    tries: dict[RequestId, _Try] = field(default_factory=dict)


class TryTracer:
    """Those of the requests that are sampled."""

    def __init__(self, core: Conductor, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        #: By the client's request id, `origin` of every try's id.
        self._generations: dict[str, _Generation] = {}

    def open(self, request_id: str, span: Span) -> None:
        """This request's tries are children of this span."""
        self._generations[request_id] = _Generation(span)

    def close(self, request_id: str) -> None:
        """No more tries will come."""
        generation = self._generations.pop(request_id)
        for request_id_of_try in list(generation.tries):
            self._end(generation, request_id_of_try, self._clock.now())

    def observe(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """One call of the core: what it was told, when, and what it said."""
        if not self._generations:
            return
        self._on_event(now, event)
        for command in commands:
            self._on_command(now, command)

    def stamped(self, message: Message) -> Message:
        """The same, saying to a worker whose child its span is."""
        if isinstance(message, StartPrefill | ReserveDecode) and (
            found := self._find(message.request_id)
        ):
            return msgspec.structs.replace(message, trace=found[1].span.context)
        return message

    # -- what the core was told --------------------------------------------------------------

    def _on_event(self, now: float, event: AnyEvent) -> None:
        match event:
            case RequestArrived(request=request):
                self._arrive(now, request)
            case RequestFinished(request_id=request_id, n_new=n_new):
                if found := self._find(request_id):
                    found[1].span.set({"halfmoon.new_tokens": n_new})
                    self._end(found[0], request_id, now)
            case RequestCancelled(request_id=request_id):
                if found := self._find(request_id):
                    found[1].span.event("cancelled", now)
                    self._end(found[0], request_id, now)
            case MessageReceived(worker_id=worker_id, message=message):
                self._on_message(now, worker_id, message)

    def _arrive(self, now: float, request: Request) -> None:
        generation = self._generations.get(original_request_id(request.request_id))
        if generation is None:
            return
        span = generation.span.child(
            "try",
            now,
            {
                "halfmoon.request_id": request.request_id,
                "halfmoon.try": request.attempt,
                "halfmoon.tokens": len(request.token_ids),
            },
        )
        generation.tries[request.request_id] = _Try(span, span.child("place", now))

    def _on_message(self, now: float, worker_id: WorkerId, message: Message) -> None:
        match message:
            case DecodeReserved(request_id=request_id):
                self._answered(now, request_id)
            case DecodeRefused(request_id=request_id, reason=reason):
                self._answered(now, request_id, reason)
            case PrefillDone(request_id=request_id, n_cached=n_cached):
                if found := self._find(request_id):
                    found[1].span.event("prefill done", now, {"halfmoon.cached_tokens": n_cached})
            case (
                PrefillFailed(request_id=request_id, reason=reason)
                | DecodeFailed(request_id=request_id, reason=reason)
            ):
                if found := self._find(request_id):
                    whose = {"halfmoon.worker": worker_id, "halfmoon.reason": reason}
                    found[1].span.event("worker failed", now, whose)

    def _answered(self, now: float, request_id: RequestId, error: str = "") -> None:
        if (found := self._find(request_id)) and found[1].reserve is not None:
            found[1].reserve.end(now, error)
            found[1].reserve = None

    # -- what it said ------------------------------------------------------------------------

    def _on_command(self, now: float, command: AnyCommand) -> None:
        match command:
            case Send(worker_id=worker_id, message=ReserveDecode(request_id=request_id)):
                self._placed(request_id, worker_id)
            case Send(worker_id=worker_id, message=StartPrefill(request_id=request_id)):
                if found := self._find(request_id):
                    found[1].span.event("prefill begun", now, {"halfmoon.worker": worker_id})
            case Send(worker_id=worker_id, message=StartDecode(request_id=request_id)):
                if found := self._find(request_id):
                    found[1].span.event("decode begun", now, {"halfmoon.worker": worker_id})
            case Deliver(request_id=request_id, finish=finish):
                if finish and (found := self._find(request_id)):
                    found[1].span.set({"halfmoon.new_tokens": 1})
                    self._end(found[0], request_id, now)
            case Reject(request_id=request_id, reason=reason):
                if found := self._find(request_id):
                    self._decided(found[1].place or found[1].span, request_id)
                    said: Attributes = {
                        "halfmoon.reject.kind": command.kind,
                        "halfmoon.reject.reason": reason,
                        "halfmoon.reject.retry_after_s": command.retry_after_s,
                    }
                    found[1].span.set(said)
                    self._end(found[0], request_id, now, reason)
            case Resubmit(request_id=request_id, reason=reason):
                if found := self._find(request_id):
                    found[0].span.event("placed again", now, {"halfmoon.reason": reason})
                    found[1].span.event("lost", now, {"halfmoon.reason": reason})
                    self._end(found[0], request_id, now, reason)
            case Fail(request_id=request_id, reason=reason):
                if found := self._find(request_id):
                    self._end(found[0], request_id, now, reason)

    def _placed(self, request_id: RequestId, decode: WorkerId) -> None:
        """A decode worker is asked; after a refusal perhaps another one."""
        if not (found := self._find(request_id)):
            return
        tried = found[1]
        now = self._clock.now()  # a decision takes a while itself
        if tried.place is not None:
            self._decided(tried.place, request_id)
            tried.place.end(now)
            tried.place = None
        if tried.reserve is not None:
            tried.reserve.end(now, "another decode worker is asked")
        tried.reserve = tried.span.child("reserve", now, {"halfmoon.worker": decode})

    def _decided(self, span: Span, request_id: RequestId) -> None:
        """Say on what grounds, if the core still knows."""
        for decision in reversed(self._core.decisions):
            if decision.request_id == request_id:
                span.set(_grounds(decision))
                return

    # -- the books ---------------------------------------------------------------------------

    def _find(self, request_id: RequestId) -> tuple[_Generation, _Try] | None:
        if not self._generations:
            return None
        generation = self._generations.get(original_request_id(request_id))
        tried = None if generation is None else generation.tries.get(request_id)
        return None if generation is None or tried is None else (generation, tried)

    def _end(
        self, generation: _Generation, request_id: RequestId, now: float, error: str = ""
    ) -> None:
        tried = generation.tries.pop(request_id)
        # What a try still waited for ends with it.
        for stage in (tried.place, tried.reserve):
            if stage is not None:
                stage.end(now, error)
        tried.span.end(now, error)


@dataclass(frozen=True)
class TracedWorkers:
    """A hub whose messages carry their requests' traces."""

    workers: WorkerPort
    tries: TryTracer

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """See `WorkerPort.send`."""
        self.workers.send(worker_id, self.tries.stamped(message))

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        """See `WorkerPort.refuse`."""
        self.workers.refuse(worker_id, reason)


def _grounds(decision: Decision) -> Attributes:
    placement = decision.placement
    chosen = placement.chosen
    others = sorted(placement.estimates, key=lambda each: each.ttft_s)[:_MAX_CANDIDATES]
    return {
        "halfmoon.outcome": decision.outcome,
        "halfmoon.prefill": placement.prefill,
        "halfmoon.decode": placement.decode or "",
        "halfmoon.cached_blocks": chosen.n_blocks,
        "halfmoon.cached_at": chosen.source or "",
        "halfmoon.estimate.queue_s": chosen.queue_s,
        "halfmoon.estimate.transfer_s": chosen.transfer_s,
        "halfmoon.estimate.prefill_s": chosen.prefill_s,
        "halfmoon.estimate.ttft_s": placement.ttft_s,
        "halfmoon.estimate.tbt_s": placement.tbt_s,
        "halfmoon.load.prefill": decision.prefill_load,
        "halfmoon.load.decode": decision.decode_load,
        "halfmoon.candidates": [f"{each.worker_id} {each.ttft_s:.4f} s" for each in others],
    }
