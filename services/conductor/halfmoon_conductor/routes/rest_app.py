"""Build the REST app: OpenAI's API over a gateway.

Only routes are here. The models of `api` check a body, and `InputProcessor` turns it into an engine
request. `OutputProcessor` generates and detokenizes, and a serializer of `api` writes the answer.
`error_responses` writes errors.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from halfmoon_conductor.api.responses.responses_requests import ResponsesRequest
from halfmoon_conductor.engine_io.gateway_interface import Gateway
from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat
from halfmoon_conductor.grammar.grammar_checker import GrammarChecker
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.http_server.auth_middleware import AuthMiddleware, ConcurrencyLimit
from halfmoon_conductor.http_server.body_receiver import BodyLimits, BodyReceiver
from halfmoon_conductor.http_server.error_bodies import AnthropicError
from halfmoon_conductor.http_server.head_requests import serve_head
from halfmoon_conductor.http_server.request_middleware import RequestMiddleware
from halfmoon_conductor.inputs.body_preparation import BodyPreparation
from halfmoon_conductor.inputs.body_preparers import BodyPreparer, ThreadPreparer
from halfmoon_conductor.inputs.input_processor import InputProcessor
from halfmoon_conductor.inputs.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_conductor.observability.metrics.vllm_metric_names import VllmNamedMetrics
from halfmoon_conductor.page.page_routes import page_routes
from halfmoon_conductor.resumption.resumable_streams import ResumableStreams
from halfmoon_conductor.resumption.resumption_limits import ResumptionLimits
from halfmoon_conductor.routes.direct_routes import DirectDispatch, DirectRoutes
from halfmoon_conductor.routes.generation_handler import GenerationHandler
from halfmoon_conductor.routes.generation_route import generation_route
from halfmoon_conductor.routes.message_routes import messages_router, responses_router
from halfmoon_conductor.routes.openai_routes import completions_router, models_router
from halfmoon_conductor.routes.openapi_additions import complete_openapi
from halfmoon_conductor.routes.openapi_responses import (
    GENERATION_RESPONSES,
    error_responses_of,
    with_error,
)
from halfmoon_conductor.routes.openapi_security import document_api_keys
from halfmoon_conductor.routes.probe_routes import probes_router
from halfmoon_conductor.routes.response_conversations import ResponseConversations
from halfmoon_conductor.routes.tokenize_routes import tokenize_router
from halfmoon_conductor.stored_responses.response_store import ResponseStore
from halfmoon_conductor.tenants import Tenants
from halfmoon_conductor.text.tokenizer_interface import Tokenizer


class RestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what the REST API accepts."""

    bodies: BodyLimits = BodyLimits()
    #: Requests being answered at once, streams included.
    max_concurrent: int = 4096
    #: Origins whose pages may call from a browser; without any, no response has CORS headers.
    cors_origins: tuple[str, ...] = ()


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    *,
    registry: CollectorRegistry,
    latencies: LatencyHistory | None = None,
    limits: RestLimits | None = None,
    tenants: Tenants | None = None,
    extra_mounts: Sequence[tuple[str, ASGIApp]] = (),
    tool_call_parser: ToolCallFormat | Literal["auto"] = "auto",
    reasoning_parser: Literal["auto", "think", "none"] = "auto",
    model_aliases: Sequence[str] = (),
    sampling_defaults: SamplingDefaults = NO_DEFAULTS,
    preparer: BodyPreparer | None = None,
    grammars: GrammarChecker | None = None,
    streams: ResumableStreams | None = None,
    responses: ResponseStore | None = None,
    operator_tokens: Sequence[str] = (),
    behind_s: Callable[[], float] = lambda: 0.0,
) -> FastAPI:
    """Build the app to serve. It owns nothing that must be closed.

    Args:
        gateway: generates tokens.
        tokenizer: the model's.
        registry: receives the HTTP metrics, and is what ``/metrics`` shows.
        latencies: also receives latencies, for operators.
        limits: limits on bodies and concurrency.
        tenants: API keys; None: requests need no key.
        extra_mounts: other apps, each at its path and below.
        tool_call_parser: how the model writes calls; "auto": as its chat template shows.
        reasoning_parser: how the model writes thoughts; "auto": as its chat template shows.
        model_aliases: other names of the model; "claude-*" is any name that begins so.
        sampling_defaults: of sampling fields that requests leave out.
        preparer: parses and tokenizes long bodies; None: threads of this process do.
        grammars: checks grammars; None: a checker is started with the first grammar.
        streams: keeps streams that clients may come back to; None: none is kept.
        responses: stores responses to go on from; None: none is stored.
        operator_tokens: each opens the routes for operators; none: without tenants they are open.
        behind_s: returns the seconds by which the event loop is behind.

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """
    metrics = HttpMetrics(registry, latencies)
    shown = VllmNamedMetrics(registry, lambda: "" if gateway.model is None else gateway.model.name)
    inputs = InputProcessor(
        gateway,
        tokenizer,
        tool_call_parser,
        grammars,
        reasoning_parser=reasoning_parser,
        aliases=model_aliases,
        defaults=sampling_defaults,
    )
    encoder = inputs.encoder
    preparer = preparer or ThreadPreparer(
        BodyPreparation(tokenizer, tool_call_parser, model_aliases)
    )
    direct = DirectRoutes()
    streams = streams or ResumableStreams(ResumptionLimits())
    conversations = ResponseConversations(responses)
    route_class = generation_route(
        lambda: encoder.model_card(None),
        preparer,
        direct,
        streams,
        metrics,
        {ResponsesRequest: conversations.expand},
    )
    handler = GenerationHandler(gateway, tokenizer, inputs, metrics, streams)
    app = _GuardedApp(
        title="Halfmoon",
        summary="The Mooncake serving system behind OpenAI's API",
        version="0.1.0",
        docs_url=None,  # these pages fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    error_responses.install_error_handlers(app)
    complete_openapi(app)
    if tenants is not None:
        document_api_keys(app)
    limits = limits or RestLimits()
    concurrency = ConcurrencyLimit(limits.max_concurrent, behind_s)
    app.guarded = _wrap(
        DirectDispatch(app.serve_unguarded, routes=direct),
        limits,
        tenants,
        metrics,
        concurrency,
        operator_tokens,
    )
    app.include_router(completions_router(handler, tokenizer, route_class))
    app.include_router(
        responses_router(
            handler,
            conversations,
            GENERATION_RESPONSES,
            error_responses_of(401, 404, 429, 503),
            route_class,
        )
    )
    app.include_router(
        messages_router(
            handler,
            with_error(AnthropicError, GENERATION_RESPONSES),
            with_error(AnthropicError, error_responses_of(400, 401, 404, 413, 429, 503)),
            route_class,
        )
    )
    app.include_router(
        tokenize_router(error_responses_of(400, 401, 404, 413, 429, 503), route_class)
    )
    app.include_router(models_router(gateway, encoder, sampling_defaults))
    app.include_router(probes_router(gateway, concurrency, shown, app.version))
    for route in page_routes():
        app.router.routes.append(route)
    for path, mounted in extra_mounts:
        # A mount alone answers only below its path, as in /metadata/, not at /metadata.
        app.router.routes.append(Route(path, _AsApp(mounted), include_in_schema=False))
        app.router.routes.append(Mount(path, mounted))
    return app


class _GuardedApp(FastAPI):
    """An app whose middleware stands before the framework's own, which costs each request more.

    Directly dispatched routes meet none of the framework's layers, and all others meet them last.
    """

    #: The middleware around `serve_unguarded`; set before the first request.
    guarded: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request through the middleware, and all else by the framework."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await serve_head(self.guarded, scope, receive, send)
        elif scope["type"] == "http":
            await self.guarded(scope, receive, send)
        else:
            await self.serve_unguarded(scope, receive, send)

    async def serve_unguarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by the framework alone."""
        await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Return the framework's layers but the one for unexpected errors.

        `RequestMiddleware` answers these, in the API's shape.
        """
        stack = super().build_middleware_stack()
        return stack.app if isinstance(stack, ServerErrorMiddleware) else stack


def _wrap(
    app: ASGIApp,
    limits: RestLimits,
    tenants: Tenants | None,
    metrics: HttpMetrics,
    concurrency: ConcurrencyLimit,
    operator_tokens: Sequence[str],
) -> ASGIApp:
    """Return an app inside all middleware; `concurrency` counts the requests being answered."""
    bodies = BodyReceiver(limits.bodies)
    app = AuthMiddleware(
        app,
        tenants=tenants,
        concurrency=concurrency,
        metrics=metrics,
        bodies=bodies,
        operator_tokens=operator_tokens,
    )
    if limits.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=limits.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestMiddleware(app, metrics=metrics, bodies=bodies)


class _AsApp:
    """Wrap an app in an object: Starlette's routes call a function as a handler, not as an app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
