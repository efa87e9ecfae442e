"""Serve the REST API in tests: a gateway without workers, behind a real socket."""

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import uvicorn
from starlette.types import ASGIApp

from halfmoon_conductor.engine_io.gateway_interface import (
    Finish,
    GenerationRequest,
    ModelCard,
    TokenEvent,
)
from halfmoon_conductor.http_server.bounded_http import HttpLimits, bounded_http
from halfmoon_protocol.logprobs import TokenScore
from halfmoon_runtime.allowed_hosts import AllowedHosts


@asynccontextmanager
async def serve_app(
    app: ASGIApp,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
    hosts: AllowedHosts | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """Serve an app as a conductor does, on a free port of 127.0.0.1; yield host and port."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = bounded_http(limits or HttpLimits(), tls, hosts)
    server = _PromptServer(
        uvicorn.Config(
            app, http=http, log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.ended.set()
        await running


class _PromptServer(uvicorn.Server):
    """Stop at once, where uvicorn looks ten times a second whether to."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Do what is due every tenth of a second until the end."""
        n_ticks = 0
        while not self.ended.is_set():
            await self.on_tick(n_ticks)
            n_ticks += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let connections and requests end for a second, and then cancel them."""
        for each in (*self.servers, *(sockets or ())):
            each.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 (uvicorn's, without an event)
                    await asyncio.sleep(0.002)
        for task in state.tasks:
            task.cancel()


class ScriptedGateway:
    """Answer every request with the same tokens, until a stop condition of the request.

    Args:
        script: tokens to generate, repeated when a request wants more.
        model: model of the workers; None: no worker has joined.
        missing: roles without a worker.
        n_cached: cached tokens of the prompt, in the first event.
        refusal: error raised instead of the first token.
        failure: error raised after `n_before_failure` tokens.
        n_before_pause: number of tokens after which generation waits for `resume`.
    """

    def __init__(
        self,
        script: Sequence[int] = (65,),
        *,
        model: ModelCard | None,
        missing: Sequence[str] = (),
        n_cached: int = 0,
        refusal: Exception | None = None,
        failure: Exception | None = None,
        n_before_failure: int = 2,
        n_before_pause: int | None = None,
    ) -> None:
        self.script = script
        self.card = model
        self.roles_missing = missing
        #: Why roles are missing.
        self.hint = ""
        self.n_cached = n_cached
        self.refusal = refusal
        self.failure = failure
        self.n_before_failure = n_before_failure
        self.n_before_pause = n_before_pause
        self.resume = asyncio.Event()
        #: Whether to break the contract: end after the first token without a finish.
        self.falls_silent = False
        #: Seconds of each stage, in the first event.
        self.stages: dict[str, float] | None = None
        #: All requests so far.
        self.requests: list[GenerationRequest] = []
        #: Ids of the requests that are being generated.
        self.live: set[str] = set()
        #: Ids of the requests that were closed before their last token.
        self.cancelled: list[str] = []
        #: Generators, held so that garbage collection does not close them.
        self._generators: list[AsyncGenerator[TokenEvent, None]] = []
        #: Tokens generated so far, over all requests.
        self.n_said = 0

    @property
    def model(self) -> ModelCard | None:
        """Model of the scripted workers."""
        return self.card

    def ready(self) -> bool:
        """True if every role has a worker."""
        return not self.roles_missing

    def missing(self) -> Sequence[str]:
        """Roles without a worker."""
        return self.roles_missing

    def missing_hint(self) -> str:
        """Return the reason that the test gave."""
        return self.hint

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate the script, with the finish reasons that workers would give."""
        self.requests.append(request)
        events = self._say(request)
        self._generators.append(events)
        return events

    async def _say(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        if self.refusal is not None:
            raise self.refusal
        self.live.add(request.request_id)
        finish: Finish = ""
        try:
            for index in range(request.stopping.max_new_tokens):
                if index == self.n_before_pause:
                    await self.resume.wait()
                if self.failure is not None and index == self.n_before_failure:
                    raise self.failure
                token = self.script[index % len(self.script)]
                finish = _finish(request, token, index + 1)
                self.n_said += 1
                event = _event(request, token, finish, self.n_cached, first=index == 0)
                yield event if index else msgspec.structs.replace(event, stages=self.stages)
                if finish or self.falls_silent:
                    return
                await asyncio.sleep(0)
        finally:
            self.live.discard(request.request_id)
            if not finish and self.failure is None:
                self.cancelled.append(request.request_id)


def _event(
    request: GenerationRequest, token: int, finish: Finish, n_cached: int, *, first: bool
) -> TokenEvent:
    """Return the event of one token, with the scores that the request asks for."""
    asked, n_prompt = request.sampling, len(request.prompt_token_ids)
    return TokenEvent(
        token,
        finish,
        n_cached if first else 0,
        None if asked.logprobs is None else scripted_score(token, asked.logprobs),
        ()
        if asked.prompt_logprobs is None or not first
        else tuple(scripted_score(request.prompt_token_ids[i], 1) for i in range(1, n_prompt)),
    )


def scripted_score(token: int, n_top: int) -> TokenScore:
    """Return the scripted score of a token."""
    top = tuple((other, -0.5 * rank) for rank, other in enumerate(range(70, 70 + n_top), 1))
    return TokenScore(-float(token) / 8, 1 + token, top)


def _finish(request: GenerationRequest, token: int, n_new: int) -> Finish:
    stopping = request.stopping
    if token in stopping.stop_token_ids and n_new > stopping.min_new_tokens:
        return "stop"
    return "length" if n_new == stopping.max_new_tokens else ""
