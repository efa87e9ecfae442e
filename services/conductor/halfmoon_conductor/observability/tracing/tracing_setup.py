"""A conductor's spans, put around the parts that it is built of; where none are wanted, nothing is.

What makes them is in `traced_http` (requests), `traced_gateway` (generations) and `traced_tries`
(what the core decided, and what it led to).
"""

from collections.abc import Callable

from starlette.types import ASGIApp

from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.observability.tracing.gateway_tracing import TracedGateway
from halfmoon_conductor.observability.tracing.http_tracing import TracingMiddleware
from halfmoon_conductor.observability.tracing.try_tracing import TracedWorkers, TryTracer
from halfmoon_conductor.workers.shell import Recorder, WorkerPort
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_scheduling.conductor.conductor_machine import Conductor


class TracingSetup:
    """Each method returns what it is given: traced, or as it is."""

    def __init__(self, tracer: Tracer | None, core: Conductor, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._tries = TryTracer(core, clock)

    @property
    def recorders(self) -> list[Recorder]:
        """What the shell is to tell of every call of the core."""
        return [] if self._tracer is None else [self._tries.observe]

    def workers(self, hub: WorkerPort) -> WorkerPort:
        """What the shell sends messages through."""
        return hub if self._tracer is None else TracedWorkers(hub, self._tries)

    def gateway(self, gateway: Gateway) -> Gateway:
        """Where the front gets tokens from."""
        if self._tracer is None:
            return gateway
        return TracedGateway(gateway, self._tries, self._clock)

    def app(self, app: ASGIApp, is_traced: Callable[[str], bool]) -> ASGIApp:
        """What serves HTTP."""
        if self._tracer is None:
            return app
        return TracingMiddleware(app, tracer=self._tracer, clock=self._clock, is_traced=is_traced)
