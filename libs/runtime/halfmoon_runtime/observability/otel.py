"""Make spans with OpenTelemetry's SDK, and export them by OTLP over HTTP.

Import this module only when traces are wanted. Spans wait in a bounded queue
(`OTEL_BSP_MAX_QUEUE_SIZE`, 2,048), from which a thread exports them. When the queue is full, spans
are dropped, with a line in the log. Nothing waits for a collector.
"""

import asyncio
import os
import threading
import time
from typing import Self

import opentelemetry.context
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.observability.tracing import Attributes, Headers

#: Seconds that `close` may wait for a collector.
_CLOSE_S = 2.0
_W3C = TraceContextTextMapPropagator()


class OtelTracer:
    """A `tracing.Tracer` on OpenTelemetry's SDK."""

    def __init__(self, service: str, worker_id: str, processor: SpanProcessor) -> None:
        """Make spans for a processor; `open` passes the one that exports."""
        attributes: dict[str, str] = {"service.instance.id": worker_id}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes[SERVICE_NAME] = service
        resource = Resource.create(attributes)
        # The environment's sampler (OTEL_TRACES_SAMPLER) decides only on clients' requests.
        self._edge = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._inside = TracerProvider(
            resource=resource, shutdown_on_exit=False, sampler=ParentBased(ALWAYS_OFF)
        )
        self._processor = processor
        for provider in (self._edge, self._inside):
            provider.add_span_processor(processor)
        self._serving = self._edge.get_tracer("halfmoon")
        self._joining = self._inside.get_tracer("halfmoon")

    @classmethod
    def open(cls, service: str, worker_id: str) -> Self:
        """Open a tracer that exports to OTEL_EXPORTER_OTLP_ENDPOINT."""
        return cls(service, worker_id, BatchSpanProcessor(OTLPSpanExporter()))

    def serve(
        self, name: str, headers: Headers, began_s: float, attributes: Attributes | None = None
    ) -> "OtelSpan | None":
        """See `Tracer.serve`."""
        parent = _W3C.extract(headers, opentelemetry.context.Context(), _FromHeaders())
        return self._begin(self._serving, name, parent, began_s, attributes)

    def join(
        self,
        context: TraceContext | None,
        name: str,
        began_s: float,
        attributes: Attributes | None = None,
    ) -> "OtelSpan | None":
        """See `Tracer.join`."""
        if context is None:
            return None
        carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
        parent = _W3C.extract(carrier, opentelemetry.context.Context())
        return self._begin(self._joining, name, parent, began_s, attributes)

    async def close(self) -> None:
        """See `Tracer.close`."""
        over = asyncio.Event()
        loop = asyncio.get_running_loop()

        def flush() -> None:
            self._processor.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(over.set)

        # A daemon thread: the process does not wait while a collector does not answer.
        threading.Thread(target=flush, name="last spans", daemon=True).start()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await over.wait()
        except TimeoutError:
            return

    def _begin(
        self,
        tracer: api.Tracer,
        name: str,
        parent: opentelemetry.context.Context,
        began_s: float,
        attributes: Attributes | None,
    ) -> "OtelSpan | None":
        epoch_ns = _epoch_ns()
        span = tracer.start_span(
            name, parent, api.SpanKind.SERVER, attributes, start_time=epoch_ns + _ns(began_s)
        )
        return OtelSpan(self._joining, span, epoch_ns) if span.is_recording() else None


class OtelSpan:
    """A `tracing.Span` on OpenTelemetry's SDK."""

    def __init__(self, tracer: api.Tracer, span: api.Span, epoch_ns: int) -> None:
        """Wrap a started span.

        Args:
            tracer: makes the span's children.
            span: the started span.
            epoch_ns: nanoseconds from 1970 to the zero of the monotonic clock. It is read once
                for a service's part of a trace, so that stages lie within each other.
        """
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns

    @property
    def context(self) -> TraceContext:
        """See `Span.context`."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._inside())
        return TraceContext(carrier["traceparent"], carrier.get("tracestate", ""))

    def child(self, name: str, began_s: float, attributes: Attributes | None = None) -> "OtelSpan":
        """See `Span.child`."""
        span = self._tracer.start_span(
            name, self._inside(), attributes=attributes, start_time=self._epoch_ns + _ns(began_s)
        )
        return OtelSpan(self._tracer, span, self._epoch_ns)

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> "OtelSpan":
        """See `Span.stage`."""
        child = self.child(name, began_s, attributes)
        child.end(ended_s)
        return child

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """See `Span.event`."""
        self._span.add_event(name, attributes, self._epoch_ns + _ns(at_s))

    def set(self, attributes: Attributes) -> None:
        """See `Span.set`."""
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """See `Span.rename`."""
        self._span.update_name(name)

    def end(self, at_s: float, error: str = "") -> None:
        """See `Span.end`."""
        if not self._span.is_recording():
            return
        if error:
            self._span.set_status(api.StatusCode.ERROR, error)
        self._span.end(self._epoch_ns + _ns(at_s))

    def _inside(self) -> opentelemetry.context.Context:
        return api.set_span_in_context(self._span, opentelemetry.context.Context())


class _FromHeaders(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = carrier(key)
        if key == "traceparent" and len(values) > 1:
            return None  # it is unknown which one is meant
        return values or None

    def keys(self, carrier: Headers) -> list[str]:
        return []


def _epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
