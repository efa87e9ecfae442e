"""Record the span of a request at decode, from its reservation to its last token.

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
class _RequestSpan:
    span: Span
    reserved_s: float
    #: 0: not yet.
    started_s: float = 0.0
    first_step_s: float = 0.0
    last_step_s: float = 0.0
    n_steps: int = 0
    #: Seconds of its steps; otherwise it waited for a page.
    stepping_s: float = 0.0


class DecodeSpans:
    """Hold the spans of sampled requests; without a tracer there is none."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._spans: dict[RequestId, _RequestSpan] = {}

    def on_reserved(self, reserve: ReserveDecode, n_pages: int, now: float) -> None:
        """Begin the span of a request whose pages are reserved."""
        if self._tracer is None or reserve.trace is None:
            return
        attributes: Attributes = {
            "halfmoon.request_id": reserve.request_id,
            "halfmoon.tokens": reserve.n_tokens,
            "halfmoon.pages": n_pages,
        }
        if span := self._tracer.join(reserve.trace, "decode", now, attributes):
            self._spans[reserve.request_id] = _RequestSpan(span, now)

    def on_started(self, request_id: RequestId, now: float) -> None:
        """Note that a request has started: its KV has landed."""
        if traced := self._spans.get(request_id):
            traced.started_s = now

    def on_step(self, request_ids: Collection[RequestId], began: float, ended: float) -> None:
        """Add a forward pass to the spans of its requests."""
        if not self._spans:
            return
        for request_id in request_ids:
            if traced := self._spans.get(request_id):
                traced.first_step_s = traced.first_step_s or ended
                traced.last_step_s = ended
                traced.n_steps += 1
                traced.stepping_s += ended - began

    def on_ended(self, request_id: RequestId, now: float, *, finish: str, error: str) -> None:
        """End the span of a request: finished, failed, or with neither, cancelled."""
        traced = self._spans.pop(request_id, None)
        if traced is None:
            return
        span = traced.span
        span.stage("wait for the landing", traced.reserved_s, traced.started_s or now)
        if traced.n_steps:
            span.stage("first step", traced.started_s, traced.first_step_s)
        if traced.n_steps > 1:
            attributes = {
                "halfmoon.new_tokens": traced.n_steps - 1,
                "halfmoon.step_s": traced.stepping_s / traced.n_steps,
            }
            span.stage("steps", traced.first_step_s, traced.last_step_s, attributes)
        span.set({"halfmoon.new_tokens": traced.n_steps})
        if finish:
            span.set({"gen_ai.response.finish_reasons": [finish]})
            span.end(traced.last_step_s)
            return
        if not error:
            span.event("cancelled", now)
        span.end(now, error)
