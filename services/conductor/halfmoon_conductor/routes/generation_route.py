"""Routes that take a body: their own way from bytes to an endpoint's arguments.

FastAPI finds out anew for every request what its endpoint wants, which takes longer than all
else that the front does with it, and reads bodies of any size on the event loop. Here short
bodies are read at once, and others by a helper process. FastAPI writes the schema.
"""

import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from halfmoon_conductor.http_server.body_receiver import received_body_of
from halfmoon_conductor.http_server.request_context import RequestContext, request_context_of
from halfmoon_conductor.inputs import body_parsing, preparation_messages
from halfmoon_conductor.inputs.body_preparers import BodyPreparer
from halfmoon_conductor.inputs.inline_limits import MAX_INLINE_BYTES, InlineLimitExceeded
from halfmoon_conductor.inputs.input_processor import InputProcessor
from halfmoon_conductor.inputs.preparation_messages import PreparationJob, PreparedAnswer, ReadBody


def generation_route(intake: InputProcessor, preparer: BodyPreparer) -> type[APIRoute]:
    """Make the class of routes whose long bodies `preparer` reads.

    Their endpoints take a `body`, and may take the `request` and an `asker`.
    """

    class GenerationRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            return _Handler(self.endpoint, intake, preparer).handle

    return GenerationRoute


class _Handler:
    """Of one route."""

    def __init__(
        self, endpoint: Callable[..., Any], intake: InputProcessor, preparer: BodyPreparer
    ) -> None:
        body = get_type_hints(endpoint)["body"]
        self._endpoint = endpoint
        self._intake = intake
        self._preparer = preparer
        self._name: str = body.__name__
        self._shape: TypeAdapter[Any] = TypeAdapter(body)
        self._wants_asker = "asker" in inspect.signature(endpoint).parameters

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        began_s = time.perf_counter()
        headers, scope = request.headers, request.scope
        body_parsing.check_headers(headers)
        asker = request_context_of(headers, scope) if self._wants_asker else None
        body = received_body_of(scope)
        if len(body.content) <= MAX_INLINE_BYTES:
            fields = body_parsing.validate_body(self._shape, body_parsing.parse_json(body.content))
            preparation_messages.keep_read_body(scope, ReadBody(began_s))
            try:
                return await self._answer(fields, request, asker)
            except InlineLimitExceeded:
                pass
        read = await self._preparer.prepare(
            PreparationJob(self._name, body.content, self._intake.card(None))
        )
        body.release()
        if isinstance(read, PreparedAnswer):
            return Response(read.content, media_type="application/json")
        preparation_messages.keep_read_body(scope, ReadBody(began_s, read))
        return await self._answer(self._shape.validate_json(read.fields), request, asker)

    async def _answer(
        self, fields: Any, request: Request, asker: RequestContext | None
    ) -> Response:
        if asker is None:
            answer = await self._endpoint(body=fields)
        else:
            answer = await self._endpoint(body=fields, request=request, asker=asker)
        if isinstance(answer, BaseModel):
            return Response(answer.model_dump_json(), media_type="application/json")
        return answer  # type: ignore[no-any-return]
