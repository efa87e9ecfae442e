"""Send the requests of a run to its conductor, and record what each client receives."""

import asyncio
import random
from dataclasses import dataclass, field

from halfmoon_conductor.engine_io.gateway_interface import GenerationRequest, TokenEvent
from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.observability.tracing.http_tracing import current_span
from halfmoon_protocol.sampling import Sampling, Stopping
from halfmoon_testing.sim_cluster.sim_services import SimService, SimWorld
from halfmoon_testing.sim_cluster.sim_shape import ClusterShape
from halfmoon_testing.sim_cluster.virtual_loop import VirtualProcess

_SALTS = ("", "tenant-a", "tenant-b")


class ConnectionBroken(Exception):
    """The conductor is gone, and the request with it."""


@dataclass
class ClientRequest:
    """One request, and what has come of it."""

    number: int
    prompt: tuple[int, ...]
    n_new: int
    salt: str
    sampling: Sampling
    #: Seconds from the start of the run.
    at_s: float
    #: Tokens after which the client leaves; None: it stays.
    leaves_after: int | None = None
    began_s: float | None = None
    ended_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    n_cached: int = 0
    #: How it ended: "ok", "left", or the name of an error.
    end: str = ""
    error: str = ""
    #: Times at which tokens came.
    first_s: float | None = None

    @property
    def request_id(self) -> str:
        """Return its name at the conductor."""
        return f"cmpl-{self.number}"


def draw_requests(dice: random.Random, shape: ClusterShape) -> list[ClientRequest]:
    """Draw the requests of a run, in the order of their arrival."""
    families = [
        tuple(dice.randrange(997) for _ in range(dice.randrange(24, 160)))
        for _ in range(shape.n_families)
    ]
    requests: list[ClientRequest] = []
    at_s = 0.0
    for number in range(shape.n_requests):
        at_s += dice.expovariate(1 / shape.arrival_s)
        family = dice.choice(families)
        earlier = [request for request in requests if request.prompt[: len(family)] == family]
        start = family[: dice.randrange(len(family) // 2, len(family) + 1)]
        if earlier and dice.random() < 0.4:
            start = dice.choice(earlier).prompt
        own = tuple(dice.randrange(997) for _ in range(dice.randrange(1, 48)))
        prompt = (start + own)[:320]
        sampled = dice.random() < 0.3
        requests.append(
            ClientRequest(
                number,
                prompt,
                dice.randrange(1, 33),
                dice.choice(_SALTS) if dice.random() < 0.5 else "",
                Sampling(temperature=1.0, seed=number) if sampled else Sampling(temperature=0.0),
                at_s,
                dice.randrange(0, 5) if dice.random() < shape.cancel_rate else None,
            )
        )
    return requests


class SimulatedClients:
    """The clients of one run, in one process that no fault meets."""

    def __init__(self, world: SimWorld) -> None:
        """Have no requests yet."""
        self.world = world
        self.process = VirtualProcess("clients")
        self.requests: list[ClientRequest] = []
        #: Of the requests under way: what tells the client that the conductor is gone.
        self._open: dict[int, tuple[SimService, asyncio.Future[None]]] = {}

    async def send(self, request: ClientRequest, conductor: SimService | None) -> ClientRequest:
        """Send a request and wait for its end."""
        self.requests.append(request)
        loop = self.world.loop
        request.began_s = loop.time()
        if conductor is None or conductor.process.is_dead or conductor.conductor is None:
            self._end(request, "ConnectionBroken", "the conductor is not there")
            return request
        over: asyncio.Future[None] = loop.create_future()
        self._open[request.number] = conductor, over
        serving: list[asyncio.Task[None]] = []
        last_s = 0.0

        def deliver(item: TokenEvent | ApiError | None) -> None:
            nonlocal last_s
            last_s = max(last_s, loop.time() + self.world.network.delay())
            loop.call_at(last_s, self._on_item, request, item, over, context=self.process.context)

        def begin() -> None:
            serving.append(loop.start(conductor.process, _serve(conductor, request, deliver)))

        loop.call_later(self.world.network.delay(), begin, context=conductor.process.context)
        await over
        del self._open[request.number]
        if request.end == "left":

            def leave() -> None:
                for task in serving:
                    task.cancel()

            loop.call_later(self.world.network.delay(), leave, context=conductor.process.context)
        return request

    def on_conductor_killed(self, conductor: SimService) -> None:
        """Break the connections of all clients to a conductor that died."""
        for number, (serving, over) in list(self._open.items()):
            if serving is conductor and not over.done():
                request = next(each for each in self.requests if each.number == number)
                self._end(request, "ConnectionBroken", "the conductor died")
                over.set_result(None)

    def _on_item(
        self,
        request: ClientRequest,
        item: TokenEvent | ApiError | None,
        over: "asyncio.Future[None]",
    ) -> None:
        if over.done():
            return
        if isinstance(item, TokenEvent):
            if not request.tokens:
                request.n_cached, request.first_s = item.n_cached, self.world.loop.time()
            request.tokens.append(item.token)
            if item.finish:
                self._end(request, "ok")
            elif len(request.tokens) == request.leaves_after:
                self._end(request, "left")
        elif item is None:
            self._end(request, "Nothing", "the stream ended without a last token")
        else:
            self._end(request, type(item).__name__, item.message)
        if request.end:
            over.set_result(None)

    def _end(self, request: ClientRequest, end: str, error: str = "") -> None:
        request.end, request.error, request.ended_s = end, error, self.world.loop.time()
        self.world.network.log(
            "clients",
            f"{request.request_id} ends in {end} after {len(request.tokens)} tokens {error}",
        )


async def _serve(conductor: SimService, request: ClientRequest, deliver: "object") -> None:
    """Run a request at the conductor, as its REST edge does."""
    assert conductor.conductor is not None and callable(deliver)
    asked = GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        sampling=request.sampling,
        stopping=Stopping(max_new_tokens=request.n_new),
        salt=request.salt,
        tenant=request.salt,
    )
    span = None
    if conductor.tracer is not None:
        span = conductor.tracer.serve(request.request_id, lambda _: [], conductor.clock.now())
        current_span.set(span)
    parts = conductor.conductor
    try:
        async for event in parts.traced.gateway(parts.gateway).generate(asked):
            deliver(event)
            if event.finish:
                return
    except ApiError as error:
        deliver(error)
    except Exception as error:
        deliver(ApiError(repr(error)))  # status 500 at the edge: an end without a name
    else:
        deliver(None)
    finally:
        if span is not None:
            span.end(conductor.clock.now())
