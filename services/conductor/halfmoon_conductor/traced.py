"""A conductor's spans, put around the parts that it is built of; where none are wanted, nothing is.

What makes them is in `traced_http` (requests), `traced_gateway` (generations) and `traced_tries`
(what the core decided, and what it led to).
"""

from starlette.types import ASGIApp

from halfmoon_conductor.generation import Gateway
from halfmoon_conductor.shell import Recorder, Workers
from halfmoon_conductor.traced_gateway import TracedGateway
from halfmoon_conductor.traced_http import TracedHttp
from halfmoon_conductor.traced_tries import TracedTries, TracedWorkers
from halfmoon_runtime.clock import Clock
from halfmoon_runtime.tracing import Tracer
from halfmoon_scheduling.conductor import Conductor


class Traced:
    """Each method returns what it is given: traced, or as it is."""

    def __init__(self, tracer: Tracer | None, core: Conductor, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._tries = TracedTries(core, clock)

    @property
    def recorders(self) -> list[Recorder]:
        """What the shell is to tell of every call of the core."""
        return [] if self._tracer is None else [self._tries.observe]

    def workers(self, hub: Workers) -> Workers:
        """What the shell sends messages through."""
        return hub if self._tracer is None else TracedWorkers(hub, self._tries)

    def gateway(self, gateway: Gateway) -> Gateway:
        """Where the front gets tokens from."""
        if self._tracer is None:
            return gateway
        return TracedGateway(gateway, self._tries, self._clock)

    def app(self, app: ASGIApp) -> ASGIApp:
        """What serves HTTP."""
        if self._tracer is None:
            return app
        return TracedHttp(app, tracer=self._tracer, clock=self._clock)
