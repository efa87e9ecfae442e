"""Traces, as services see them: spans with a parent, at times of the machine's monotonic clock.

    outside ──headers──▶ Tracer.serve ──▶ Span ──▶ child, child …        the conductor
                                           │ context, in a message
                                           ▼
                                       Tracer.join ──▶ Span ──▶ child …  a worker

Whether a request is sampled is decided once, where it comes in; whoever gets no context makes
no spans. Nothing here imports OpenTelemetry: `halfmoon_runtime.observability.otel` does, and is
imported only
when traces are wanted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pydantic import Field

from halfmoon_protocol.trace_context import TraceContext
from halfmoon_runtime.settings import ServiceSettings

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
#: All values of a header, by its name in lower case.
Headers = Callable[[str], list[str]]


class TracedSettings(ServiceSettings):
    """Settings of a service that makes spans."""

    traces: bool = Field(
        False,
        description="Export traces by OTLP over HTTP; where to, which requests, and under which"
        " name OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME say. Needs"
        " halfmoon-runtime[otel]",
    )


class Span(Protocol):
    """A stretch of time in one service, and what is to be known of it."""

    @property
    def context(self) -> TraceContext:
        """What makes spans of other services its children."""
        ...

    def child(self, name: str, began_s: float, attributes: Attributes | None = None) -> "Span":
        """A stretch within this one, still to be ended."""
        ...

    def stage(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes | None = None
    ) -> "Span":
        """A child that is over. It may have children of its own yet."""
        ...

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """Something that happened within it."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Say more of it, as long as it is not ended."""
        ...

    def rename(self, name: str) -> None:
        """A better name has become known."""
        ...

    def end(self, at_s: float, error: str = "") -> None:
        """It is over; with an error, it went wrong. Ends once: later calls change nothing."""
        ...


class Tracer(Protocol):
    """Makes a service's spans. From any thread; none of its methods waits for a network."""

    def serve(
        self, name: str, headers: Headers, began_s: float, attributes: Attributes | None = None
    ) -> Span | None:
        """A request from outside: goes on with the trace that its headers name, or begins one.

        Headers that are no valid W3C trace context are as none. None if it is not sampled.
        """
        ...

    def join(
        self,
        context: TraceContext | None,
        name: str,
        began_s: float,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """A request of another service of the cluster.

        None if there is no context, if it is not sampled, or not a valid one.
        """
        ...

    async def close(self) -> None:
        """Send what is left, for two seconds at the most."""
        ...


class TracesUnavailable(Exception):
    """Traces are wanted and can't be made; the text says what to do."""


def open_tracer(settings: TracedSettings, service: str) -> Tracer | None:
    """The tracer that the settings want; None if they want none.

    Args:
        settings: whether, and the worker's id.
        service: the service's name, such as ``halfmoon-prefill``, unless the environment has
            another.

    Raises:
        TracesUnavailable: the optional packages are not installed.
    """
    if not settings.traces:
        return None
    try:
        from halfmoon_runtime.observability.otel import OtelTracer
    except ImportError as error:
        raise TracesUnavailable(
            f"traces are on (HALFMOON_TRACES) and {error.name} is not installed: "
            "pip install 'halfmoon-runtime[otel]', or turn them off"
        ) from error
    return OtelTracer.open(service, settings.worker_id)
