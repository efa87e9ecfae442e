"""Route requests with a body from their bytes to an endpoint's arguments.

FastAPI inspects each endpoint's arguments anew for every request and parses bodies of any size on
the event loop. This route class inspects its endpoint once. It parses short bodies of token ids
inline, and hands all others to a child process. FastAPI still writes the OpenAPI schema.

Without this class, a request with 512 token ids takes 1.5 times the CPU time
(``python -m benchmarks.conductor.ablations``).
"""

import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from halfmoon_conductor.api.openai.openai_requests import CompletionRequest
from halfmoon_conductor.api.sse import EventStream
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.errors import InvalidRequest
from halfmoon_conductor.http_server.auth_middleware import principal_of
from halfmoon_conductor.http_server.body_receiver import received_body_of
from halfmoon_conductor.http_server.request_context import RequestContext, request_context_of
from halfmoon_conductor.http_server.resumption_headers import resumption_of
from halfmoon_conductor.inputs import body_parsing, preparation_messages
from halfmoon_conductor.inputs.body_preparers import BodyPreparer
from halfmoon_conductor.inputs.preparation_messages import (
    ExpandedBody,
    PreparationJob,
    PreparedAnswer,
    ReadBody,
)
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics
from halfmoon_conductor.resumption.resumable_streams import ResumableStreams
from halfmoon_conductor.routes.direct_routes import DirectRoutes

#: Bodies of token ids up to this size are parsed and checked on the event loop. Texts never are:
#: chat templates and tokenizers come with a checkpoint, and may take any time and memory.
MAX_INLINE_BYTES = 10 * 1024
#: Takes a body's bytes and a tenant's name, and returns the bytes to parse.
BodyExpander = Callable[[bytes, str], Awaitable[ExpandedBody]]


class AnsweredByPreparer(AssertionError):
    """Raised by an endpoint that is there for the schema: a child process answers its bodies."""


def generation_route(
    model_card: Callable[[], ModelCard],
    preparer: BodyPreparer,
    direct: DirectRoutes,
    streams: ResumableStreams,
    metrics: HttpMetrics,
    expanders: Mapping[type[BaseModel], BodyExpander] = MappingProxyType({}),
) -> type[APIRoute]:
    """Make the class of routes whose texts `preparer` reads.

    Their endpoints take a `body`, and may take the `request` and a `context`.

    Args:
        model_card: returns the model served; raises an `ApiError` when there is none.
        preparer: parses and tokenizes long bodies, and those with texts.
        direct: lists each route that is made.
        streams: those that clients may come back to.
        metrics: counts the clients that do.
        expanders: by the class of a body, what completes its bytes before they are parsed.
    """

    class GenerationRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            caller = _EndpointCaller(
                self.endpoint, model_card, preparer, streams, metrics, expanders
            )
            handle = caller.handle
            direct.add(self, handle)
            return handle

    return GenerationRoute


class _EndpointCaller:
    """Call one route's endpoint."""

    def __init__(
        self,
        endpoint: Callable[..., Any],
        model_card: Callable[[], ModelCard],
        preparer: BodyPreparer,
        streams: ResumableStreams,
        metrics: HttpMetrics,
        expanders: Mapping[type[BaseModel], BodyExpander],
    ) -> None:
        model = get_type_hints(endpoint)["body"]
        self._endpoint = endpoint
        self._model_card = model_card
        self._preparer = preparer
        self._streams = streams
        self._metrics = metrics
        self._model_name: str = model.__name__
        self._expand = expanders.get(model)
        self._body_type: TypeAdapter[Any] = TypeAdapter(model)
        self._may_have_ids = model is CompletionRequest
        self._takes_context = "context" in inspect.signature(endpoint).parameters

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        received_s = time.perf_counter()
        headers, scope = request.headers, request.scope
        body_parsing.check_headers(headers)
        context = request_context_of(headers, scope) if self._takes_context else None
        received = received_body_of(scope)
        if context is not None:
            tenant = context.principal.name
            resumption = await resumption_of(scope, tenant, received.content)
            if resumption is not None:
                kept = self._streams.find(resumption)
                if resumption.last is not None:
                    self._metrics.on_resumed("computed" if kept is None else "kept")
                if kept is not None:
                    return EventStream(kept.read(resumption.last), kept.error_event)
                context = replace(context, resumption=resumption)
        content, expanded = received.content, None
        if self._expand is not None:
            expanded = await self._expand(content, principal_of(scope).name)
            content = expanded.content
        if self._may_have_ids and len(content) <= MAX_INLINE_BYTES:
            parsed = body_parsing.parse_json(content)
            if not _has_text(parsed):
                body = body_parsing.validate_body(self._body_type, parsed)
                preparation_messages.keep_read_body(scope, ReadBody(received_s, None, expanded))
                return await self._respond(body, request, context)
        job = PreparationJob(self._model_name, content, self._model_card())
        prepared = await self._preparer.prepare(job, principal_of(scope).name)
        received.release()
        if isinstance(prepared, PreparedAnswer):
            return Response(prepared.content, media_type="application/json")
        preparation_messages.keep_read_body(scope, ReadBody(received_s, prepared, expanded))
        del content, expanded, job  # a generation takes longer than its body is needed
        body = self._body_type.validate_json(prepared.fields)
        return await self._respond(body, request, context)

    async def _respond(
        self, body: Any, request: Request, context: RequestContext | None
    ) -> Response:
        context = _of_streams_alone(body, context)
        if context is None:
            response = await self._endpoint(body=body)
        else:
            response = await self._endpoint(body=body, request=request, context=context)
        if isinstance(response, BaseModel):
            return Response(response.model_dump_json(), media_type="application/json")
        return response  # type: ignore[no-any-return]


def _has_text(body: Any) -> bool:
    """Return whether a completion has text to encode, or asks for the text of its prompt."""
    if not isinstance(body, dict):
        return False
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return bool(body.get("echo")) or any(isinstance(each, str) for each in prompts)


def _of_streams_alone(body: Any, context: RequestContext | None) -> RequestContext | None:
    """Return the context without the stream that it names, if the answer is no stream.

    Raises:
        InvalidRequest: the client has a part of it already.
    """
    if context is None or context.resumption is None or body.stream:
        return context
    if context.resumption.last is not None:
        raise InvalidRequest(
            "Last-Event-ID goes on with a stream, and this body asks for a whole answer: send "
            '"stream": true, as before.',
            param="last-event-id",
        )
    return replace(context, resumption=None)
