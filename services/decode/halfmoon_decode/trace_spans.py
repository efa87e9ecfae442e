"""The span of a request at decode, from its reservation to its last token.

decode ──▶ wait for the landing   pages are set aside; prefill computes and writes
      ├──▶ first step             from `StartDecode` to the first token made here
      └──▶ steps                  all further ones: one span, and how many there were
"""

from collections.abc import Collection
from dataclasses import dataclass

from halfmoon_protocol.ids import RequestId
from halfmoon_protocol.messages import ReserveDecode
from halfmoon_runtime.observability.tracing import Attributes, Span, Tracer


@dataclass
class _Traced:
    span: Span
    reserved_s: float
    #: 0: not yet.
    started_s: float = 0.0
    first_step_s: float = 0.0
    last_step_s: float = 0.0
    n_steps: int = 0
    #: Seconds of the steps that it was in; the rest it waited for a page, or for a stalled pool.
    stepping_s: float = 0.0


class DecodeSpans:
    """Those of the requests here that are sampled. Without a tracer nothing is kept."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._traced: dict[RequestId, _Traced] = {}

    def reserved(self, wanted: ReserveDecode, n_pages: int, now: float) -> None:
        """Pages were set aside."""
        if self._tracer is None or wanted.trace is None:
            return
        said: Attributes = {
            "halfmoon.request_id": wanted.request_id,
            "halfmoon.tokens": wanted.n_tokens,
            "halfmoon.pages": n_pages,
        }
        if span := self._tracer.join(wanted.trace, "decode", now, said):
            self._traced[wanted.request_id] = _Traced(span, now)

    def started(self, request_id: RequestId, now: float) -> None:
        """Its KV is there; it runs."""
        if traced := self._traced.get(request_id):
            traced.started_s = now

    def stepped(self, request_ids: Collection[RequestId], began: float, ended: float) -> None:
        """A forward pass over these is over."""
        if not self._traced:
            return
        for request_id in request_ids:
            if traced := self._traced.get(request_id):
                traced.first_step_s = traced.first_step_s or ended
                traced.last_step_s = ended
                traced.n_steps += 1
                traced.stepping_s += ended - began

    def ended(self, request_id: RequestId, now: float, *, finish: str, error: str) -> None:
        """It is gone: finished, failed, or with neither, cancelled."""
        traced = self._traced.pop(request_id, None)
        if traced is None:
            return
        span = traced.span
        span.stage("wait for the landing", traced.reserved_s, traced.started_s or now)
        if traced.n_steps:
            span.stage("first step", traced.started_s, traced.first_step_s)
        if traced.n_steps > 1:
            said = {
                "halfmoon.new_tokens": traced.n_steps - 1,
                "halfmoon.step_s": traced.stepping_s / traced.n_steps,
            }
            span.stage("steps", traced.first_step_s, traced.last_step_s, said)
        span.set({"halfmoon.new_tokens": traced.n_steps})
        if finish:
            span.set({"gen_ai.response.finish_reasons": [finish]})
            span.end(traced.last_step_s)
            return
        if not error:
            span.event("cancelled", now)
        span.end(now, error)
