"""The REST front: OpenAI's API over a gateway.

Routes only: a request is read by `openai_requests`, made an order by `intake`, read as tokens
by `answering` and written by `answer_shapes`; errors are `error_responses`.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from halfmoon_conductor import error_responses
from halfmoon_conductor.answer_shapes import AnswerShape, ChatShape, CompletionShape
from halfmoon_conductor.answering import Answer
from halfmoon_conductor.disconnect import unless_client_gone
from halfmoon_conductor.edge import Edge
from halfmoon_conductor.generation import Gateway, ModelCard
from halfmoon_conductor.http_metrics import HttpMetrics
from halfmoon_conductor.intake import Intake, Order
from halfmoon_conductor.latency_headers import LatencyHeaders
from halfmoon_conductor.logprob_shapes import LogprobWriter
from halfmoon_conductor.openai_requests import ChatRequest, CompletionRequest, SharedFields
from halfmoon_conductor.openai_responses import (
    ChatCompletion,
    Completion,
    ErrorResponse,
    Health,
    Model,
    ModelList,
    Readiness,
)
from halfmoon_conductor.sse import EventStream
from halfmoon_conductor.tokenizer import Tokenizer
from halfmoon_conductor.tokenizing import tokenizing_router


class FrontLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the front accepts."""

    #: A prompt of a million tokens fits, as text or as ids.
    max_body_bytes: int = 8 * 1024 * 1024


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    *,
    registry: CollectorRegistry,
    limits: FrontLimits | None = None,
    extra_mounts: Sequence[tuple[str, ASGIApp]] = (),
) -> FastAPI:
    """The app to serve. It owns nothing that must be closed.

    Args:
        gateway: where tokens come from.
        tokenizer: the model's.
        registry: where the front's metrics go, and what ``/metrics`` shows.
        limits: what is accepted.
        extra_mounts: other apps, each at its path and below.

    Raises:
        TokenizerUnavailable: the tokenizer's chat template is not valid.
    """
    metrics = HttpMetrics(registry)
    intake = Intake(gateway, tokenizer)
    app = FastAPI(
        title="Halfmoon",
        summary="The Mooncake serving system behind OpenAI's API",
        version="0.1.0",
        docs_url=None,  # these pages fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    error_responses.install(app)
    app.add_middleware(
        Edge, metrics=metrics, max_body_bytes=(limits or FrontLimits()).max_body_bytes
    )

    def answer(order: Order, began_s: float) -> Answer:
        return Answer(gateway, order, tokenizer, metrics, began_s=began_s)

    def logprobs(body: SharedFields) -> LogprobWriter:
        return LogprobWriter(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))

    @app.post("/v1/completions", response_model=Completion, responses=_GENERATION_RESPONSES)
    async def create_completion(
        body: CompletionRequest, request: Request, slo: LatencyHeaders
    ) -> Response:
        """Go on with a text."""
        began_s = time.perf_counter()
        order = await intake.completion(body, slo)
        shape = CompletionShape(answer(order, began_s), body, logprobs(body))
        return await _respond(shape, body, request)

    @app.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=_GENERATION_RESPONSES
    )
    async def create_chat_completion(
        body: ChatRequest, request: Request, slo: LatencyHeaders
    ) -> Response:
        """Answer a conversation."""
        began_s = time.perf_counter()
        order = await intake.chat(body, slo)
        shape = ChatShape(answer(order, began_s), body, logprobs(body))
        return await _respond(shape, body, request)

    app.include_router(tokenizing_router(intake, _errors(400, 404, 413, 503)))

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """The model served, once a worker has joined."""
        card = gateway.model
        return ModelList(object="list", data=[] if card is None else [_model(card)])

    @app.get("/v1/models/{model:path}", responses=_errors(404, 503))
    async def retrieve_model(model: str) -> Model:
        """One model by its name, which may have slashes."""
        return _model(intake.card(model))

    @app.get("/health")
    async def health() -> Health:
        """The process lives and answers."""
        return Health(status="ok")

    @app.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}})
    async def ready() -> Response:
        """Whether prefill and decode workers are there to serve requests."""
        is_ready = gateway.ready()
        report = Readiness(ready=is_ready, missing=list(gateway.missing()))
        return JSONResponse(report.model_dump(), status_code=200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics(request: Request) -> Response:
        """Prometheus metrics."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    for path, mounted in extra_mounts:
        # A mount alone answers only below its path, as in /metadata/, not at /metadata.
        app.router.routes.append(Route(path, _AsApp(mounted), include_in_schema=False))
        app.router.routes.append(Mount(path, mounted))
    return app


async def _respond(shape: AnswerShape, body: SharedFields, request: Request) -> Response:
    if body.stream:
        return EventStream(shape.events(), error_responses.error_event)
    whole = await unless_client_gone(request.receive, shape.whole())
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.name,
        object="model",
        created=card.created,
        owned_by="halfmoon",
        max_model_len=card.max_context,
    )


class _AsApp:
    """An object, which a route calls as an app where it would call a function as a handler."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


_ERROR_DESCRIPTIONS = {
    400: "The request is wrong; `param` names the field.",
    404: "Another model is served here.",
    413: "The body is too large.",
    429: "Refused so that others keep their latency; `Retry-After` says when to try again.",
    500: "The generation, or the server, failed.",
    503: "No prefill or no decode worker is alive; `Retry-After` says when to try again.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": _ERROR_DESCRIPTIONS[status]}
        for status in statuses
    }
    responses["4XX"] = {"model": ErrorResponse, "description": "Any other error of the client's."}
    return responses


_GENERATION_RESPONSES: dict[int | str, dict[str, Any]] = {
    **_errors(*_ERROR_DESCRIPTIONS),
    200: {
        "description": "The answer; server-sent events with `stream: true`.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"object": "…", "choices": […]}\n\ndata: [DONE]\n\n',
            }
        },
    },
}
