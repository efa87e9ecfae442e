"""Make spans in virtual time, and know which have not ended."""

import itertools

from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.observability.tracing import Attributes, Headers


class SimTracer:
    """The tracer of one process; each request is sampled."""

    def __init__(self) -> None:
        """Have no spans."""
        self._numbers = itertools.count(1)
        #: Spans that have not ended, with their names.
        self.unended: dict[SimSpan, str] = {}

    def serve(
        self, name: str, headers: Headers, began_s: float, attributes: Attributes | None = None
    ) -> "SimSpan":
        """See `Tracer.serve`."""
        return self.begin(name)

    def join(
        self,
        context: TraceContext | None,
        name: str,
        began_s: float,
        attributes: Attributes | None = None,
    ) -> "SimSpan | None":
        """See `Tracer.join`."""
        return None if context is None else self.begin(name)

    async def close(self) -> None:
        """See `Tracer.close`."""

    def begin(self, name: str) -> "SimSpan":
        """Begin a span."""
        span = SimSpan(self, next(self._numbers))
        self.unended[span] = name
        return span


class SimSpan:
    """A span whose name and end are kept, and nothing else."""

    def __init__(self, tracer: SimTracer, number: int) -> None:
        """Begin."""
        self._tracer = tracer
        self.context = TraceContext(f"00-{number:032x}-{number:016x}-01")

    def child(self, name: str, began_s: float, attributes: Attributes | None = None) -> "SimSpan":
        """See `Span.child`."""
        return self._tracer.begin(name)

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> "SimSpan":
        """See `Span.stage`."""
        assert began_s <= ended_s, f"{name} ends before it begins"
        span = self._tracer.begin(name)
        span.end(ended_s)
        return span

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """See `Span.event`."""

    def set(self, attributes: Attributes) -> None:
        """See `Span.set`."""

    def rename(self, name: str) -> None:
        """See `Span.rename`."""

    def end(self, at_s: float, error: str = "") -> None:
        """See `Span.end`."""
        self._tracer.unended.pop(self, None)
