"""Trace tries, from the events and commands that pass between the core and its shell.

    generation ──▶ try ──▶ place       from arrival until a decode worker is asked
                    │  └─▶ reserve     until it has reserved pages, or refused
                    ├────▶ prefill     the prefill worker's span, named in `StartPrefill`
                    └────▶ decode      the decode worker's span, named in `ReserveDecode`

The core knows nothing of traces: a recorder observes it, as a journal does. The loss of a worker is
an event of the try that it ended; the next try has a span of its own.
"""

from collections import OrderedDict
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

#: Most prefill workers whose estimates are recorded beside the chosen one's.
_MAX_CANDIDATES = 8


@dataclass
class _Try:
    span: Span
    #: Running while the try has no decode worker.
    place: Span | None
    #: Running while a decode worker is asked.
    reserve: Span | None = None


@dataclass
class _Generation:
    span: Span
    #: Tries by their ids; at most one is not over.
    tries: dict[RequestId, _Try] = field(default_factory=dict)


class TryTracer:
    """Trace the tries of sampled requests."""

    def __init__(self, core: Conductor, clock: Clock) -> None:
        self._core = core
        self._clock = clock
        #: By the client's request id, which `original_request_id` returns for the id of every try.
        self._generations: dict[str, _Generation] = {}
        #: Ids of the last traces, of requests that are over too; the oldest first.
        self._trace_ids: OrderedDict[str, str] = OrderedDict()

    def open(self, request_id: str, span: Span) -> None:
        """Make the request's tries children of this span."""
        self._generations[request_id] = _Generation(span)
        self._trace_ids[request_id] = span.context.traceparent.split("-")[1]
        if len(self._trace_ids) > self._core.config.kept_decisions:
            self._trace_ids.popitem(last=False)

    def trace_id(self, request_id: RequestId) -> str:
        """Return the trace id of one of the last sampled requests, by any try; else nothing."""
        return self._trace_ids.get(original_request_id(request_id), "")

    def close(self, request_id: str) -> None:
        """End the spans of a request; no more tries will come."""
        generation = self._generations.pop(request_id)
        for request_id_of_try in list(generation.tries):
            self._end(generation, request_id_of_try, self._clock.now())

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Record one call of the core: its time, event and commands."""
        if not self._generations:
            return
        self._on_event(now, event)
        for command in commands:
            self._on_command(now, command)

    def with_trace_context(self, message: Message) -> Message:
        """Return the message with the trace context for a worker's span."""
        if isinstance(message, StartPrefill | ReserveDecode) and (
            found := self._find(message.request_id)
        ):
            return msgspec.structs.replace(message, trace=found[1].span.context)
        return message

    # -- events of the core ------------------------------------------------------------------

    def _on_event(self, now: float, event: AnyEvent) -> None:
        match event:
            case RequestArrived(request=request):
                self._on_arrival(now, request)
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

    def _on_arrival(self, now: float, request: Request) -> None:
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
                self._on_decode_answer(now, request_id)
            case DecodeRefused(request_id=request_id, reason=reason):
                self._on_decode_answer(now, request_id, reason)
            case PrefillDone(request_id=request_id, n_cached=n_cached):
                if found := self._find(request_id):
                    found[1].span.event("prefill done", now, {"halfmoon.cached_tokens": n_cached})
            case (
                PrefillFailed(request_id=request_id, reason=reason)
                | DecodeFailed(request_id=request_id, reason=reason)
            ):
                if found := self._find(request_id):
                    attributes = {"halfmoon.worker": worker_id, "halfmoon.reason": reason}
                    found[1].span.event("worker failed", now, attributes)

    def _on_decode_answer(self, now: float, request_id: RequestId, error: str = "") -> None:
        if (found := self._find(request_id)) and found[1].reserve is not None:
            found[1].reserve.end(now, error)
            found[1].reserve = None

    # -- commands of the core ----------------------------------------------------------------

    def _on_command(self, now: float, command: AnyCommand) -> None:
        match command:
            case Send(worker_id=worker_id, message=ReserveDecode(request_id=request_id)):
                self._on_reserve_sent(request_id, worker_id)
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
                    self._set_decision(found[1].place or found[1].span, request_id)
                    attributes: Attributes = {
                        "halfmoon.reject.kind": command.kind,
                        "halfmoon.reject.reason": reason,
                        "halfmoon.reject.retry_after_s": command.retry_after_s,
                    }
                    found[1].span.set(attributes)
                    self._end(found[0], request_id, now, reason)
            case Resubmit(request_id=request_id, reason=reason):
                if found := self._find(request_id):
                    found[0].span.event("placed again", now, {"halfmoon.reason": reason})
                    found[1].span.event("lost", now, {"halfmoon.reason": reason})
                    self._end(found[0], request_id, now, reason)
            case Fail(request_id=request_id, reason=reason):
                if found := self._find(request_id):
                    self._end(found[0], request_id, now, reason)

    def _on_reserve_sent(self, request_id: RequestId, decode: WorkerId) -> None:
        """Record that a decode worker is asked; after a refusal it may be another one."""
        if not (found := self._find(request_id)):
            return
        tried = found[1]
        now = self._clock.now()  # the decision itself takes time
        if tried.place is not None:
            self._set_decision(tried.place, request_id)
            tried.place.end(now)
            tried.place = None
        if tried.reserve is not None:
            tried.reserve.end(now, "another decode worker is asked")
        tried.reserve = tried.span.child("reserve", now, {"halfmoon.worker": decode})

    def _set_decision(self, span: Span, request_id: RequestId) -> None:
        """Add the core's decision to the span, if the core still has it."""
        for decision in reversed(self._core.decisions):
            if decision.request_id == request_id:
                span.set(_decision_attributes(decision))
                return

    # -- tries -------------------------------------------------------------------------------

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
        # Stages that the try still waits for end with it.
        for stage in (tried.place, tried.reserve):
            if stage is not None:
                stage.end(now, error)
        tried.span.end(now, error)


@dataclass(frozen=True)
class TracedWorkers:
    """Send messages to workers with the trace contexts of their requests."""

    workers: WorkerPort
    tries: TryTracer

    def send(self, worker_id: WorkerId, message: Message) -> None:
        """Queue a message; see `WorkerPort.send`."""
        self.workers.send(worker_id, self.tries.with_trace_context(message))

    def refuse(self, worker_id: WorkerId, reason: str) -> None:
        """Refuse a worker; see `WorkerPort.refuse`."""
        self.workers.refuse(worker_id, reason)


def _decision_attributes(decision: Decision) -> Attributes:
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
