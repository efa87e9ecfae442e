"""Open the tracer that a service's settings ask for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import Field

from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.settings import ServiceSettings


class TracedSettings(ServiceSettings):
    """Settings of a service that makes spans."""

    traces: bool = Field(
        False,
        description="Export traces by OTLP over HTTP; where to, which requests, and under which"
        " name OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_TRACES_SAMPLER and OTEL_SERVICE_NAME say. Needs"
        " halfmoon-runtime[otel]",
    )


class TracesUnavailable(Exception):
    """Traces are wanted and their packages are missing; the text says what to install."""


def open_tracer(settings: TracedSettings, service: str) -> Tracer | None:
    """Return the tracer that the settings ask for; None if traces are off.

    Args:
        settings: whether to trace, and the worker's id.
        service: name of the service, such as ``halfmoon-prefill``. OTEL_SERVICE_NAME wins
            over it.

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


@asynccontextmanager
async def opened_tracer(settings: TracedSettings, service: str) -> AsyncIterator[Tracer | None]:
    """Open the tracer for the length of a block: see `open_tracer`."""
    tracer = open_tracer(settings, service)
    try:
        yield tracer
    finally:
        if tracer is not None:
            await tracer.close()
