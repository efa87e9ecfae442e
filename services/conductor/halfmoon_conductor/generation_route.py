"""Routes of generations: FastAPI's, with a short way for requests that are well formed.

FastAPI finds out anew for every request what its endpoint wants, which takes longer than all
else that the front does with it. What these endpoints want is always the same: a body, the
request, and who asks. Whatever is unusual, every error included, goes FastAPI's own way.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from pydantic_core import from_json

from halfmoon_conductor.asking import Asker, says_latencies
from halfmoon_conductor.door import caller_of

Endpoint = Callable[..., Awaitable[Response]]


class GenerationRoute(APIRoute):
    """For endpoints of three arguments: `body`, `request`, and an `asker`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        long_way = super().get_route_handler()
        endpoint: Endpoint = self.endpoint
        shape: TypeAdapter[Any] = TypeAdapter(get_type_hints(endpoint)["body"])

        async def handle(request: Request) -> Response:
            headers = request.headers
            if headers.get("content-type") != "application/json" or says_latencies(headers):
                return await long_way(request)
            # Read once: the long way gets the same bytes from the request.
            content = await request.body()
            try:
                body = shape.validate_python(from_json(content))
            except ValueError:
                return await long_way(request)
            return await endpoint(body=body, request=request, asker=Asker(caller_of(request.scope)))

        return handle
