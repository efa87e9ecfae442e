"""Define spans and the tracer that makes them, without OpenTelemetry.

    client ──headers──▶ Tracer.serve ──▶ Span ──▶ child, child …         the conductor
                                          │ context, in a message
                                          ▼
                                      Tracer.join ──▶ Span ──▶ child …   a worker

Times are those of the machine's monotonic clock. The conductor decides once, at the client's
request, whether it is sampled. A worker that gets no context makes no spans.
`halfmoon_runtime.observability.otel` implements these interfaces, and
`halfmoon_runtime.observability.tracer_setup` imports it only when traces are wanted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from halfmoon_protocol.trace_context import TraceContext

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
#: All values of a header, by its name in lower case.
Headers = Callable[[str], list[str]]


class Span(Protocol):
    """Record a stretch of time in one service, with its attributes and events."""

    @property
    def context(self) -> TraceContext:
        """Trace context to send to another service, so that its spans become children."""
        ...

    def child(self, name: str, began_s: float, attributes: Attributes | None = None) -> "Span":
        """Start a span within this one; the caller ends it."""
        ...

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> "Span":
        """Add a child span that has ended already; it may still get children of its own."""
        ...

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """Add an event within this span."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Set further attributes, before the span has ended."""
        ...

    def rename(self, name: str) -> None:
        """Replace the span's name by one that has become known since it started."""
        ...

    def end(self, at_s: float, error: str = "") -> None:
        """End the span, as failed if there is an error text. Later calls change nothing."""
        ...


class Tracer(Protocol):
    """Make a service's spans, from any thread. No method waits for a network."""

    def serve(
        self, name: str, headers: Headers, began_s: float, attributes: Attributes | None = None
    ) -> Span | None:
        """Start the span of a client's request.

        It continues the trace that the headers name, or begins one. Headers that are no valid
        W3C trace context count as none. Return None if the request is not sampled.
        """
        ...

    def join(
        self,
        context: TraceContext | None,
        name: str,
        began_s: float,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """Start the span of a request that another service of the cluster sent.

        Return None without a context, with an invalid one, or if the request is not sampled.
        """
        ...

    async def close(self) -> None:
        """Export the remaining spans, for two seconds at most."""
        ...
