"""Put tracing around the parts of a conductor; without a tracer, nothing.

`http_tracing` traces requests, `gateway_tracing` generations, and `try_tracing` the core's
decisions and their consequences.
"""

from collections.abc import Callable

from starlette.types import ASGIApp

from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.observability.tracing.gateway_tracing import TracedGateway
from halfmoon_conductor.observability.tracing.http_tracing import TracingMiddleware
from halfmoon_conductor.observability.tracing.try_tracing import TracedWorkers, TryTracer
from halfmoon_conductor.workers.shell import Recorder, WorkerPort
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_scheduling.conductor.conductor_machine import Conductor


class TracingSetup:
    """Wrap parts of a conductor for tracing; without a tracer each method returns its argument."""

    def __init__(self, tracer: Tracer | None, core: Conductor, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._tries = TryTracer(core, clock)

    @property
    def recorders(self) -> list[Recorder]:
        """Recorders for the shell."""
        return [] if self._tracer is None else [self._tries.record]

    def trace_id(self, request_id: RequestId) -> str:
        """Return the trace id of one of the last sampled requests; else nothing."""
        return self._tries.trace_id(request_id)

    def workers(self, workers: WorkerPort) -> WorkerPort:
        """Return the port through which the shell sends messages."""
        return workers if self._tracer is None else TracedWorkers(workers, self._tries)

    def gateway(self, gateway: Gateway) -> Gateway:
        """Return the gateway for the REST API."""
        if self._tracer is None:
            return gateway
        return TracedGateway(gateway, self._tries, self._clock)

    def app(self, app: ASGIApp, is_traced: Callable[[str], bool]) -> ASGIApp:
        """Return the app that serves HTTP.

        Args:
            app: the app.
            is_traced: whether requests for a path are traced.
        """
        if self._tracer is None:
            return app
        return TracingMiddleware(app, tracer=self._tracer, clock=self._clock, is_traced=is_traced)
