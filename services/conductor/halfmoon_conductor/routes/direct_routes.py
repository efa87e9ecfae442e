"""Dispatch requests to routes with a known path, past the framework's own search.

FastAPI's way to an endpoint goes through two exception handlers, two exit stacks and the patterns
of every router: a seventh of the processor time of a short request. Routes that are listed here are
found by their path in a table. FastAPI still serves all else: it answers wrong methods and unknown
paths, and it writes the schema.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.http_server import error_responses

Handler = Callable[[Request], Awaitable[Response]]


class _Direct(NamedTuple):
    """A route and its handler."""

    route: APIRoute
    handle: Handler


@dataclass(frozen=True)
class DirectRoutes:
    """List routes that take POST requests at one fixed path."""

    _by_path: dict[str, _Direct] = field(default_factory=dict)

    def add(self, route: APIRoute, handle: Handler) -> None:
        """Add a route, unless its path is a pattern or it takes other methods."""
        if route.methods == {"POST"} and "{" not in route.path:
            self._by_path[route.path] = _Direct(route, handle)

    def find(self, scope: Scope) -> _Direct | None:
        """Return the route of a request, if it is listed."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        return self._by_path.get(scope["path"])


class DirectDispatch:
    """Serve the listed routes; hand all other requests to the wrapped app.

    Args:
        app: the app to wrap.
        routes: those to serve here.
    """

    def __init__(self, app: ASGIApp, *, routes: DirectRoutes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        found = self._routes.find(scope)
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = found.route
        try:
            response = await found.handle(Request(scope, receive))
            # A stream raises only before it has started: see `EventStream`.
            await response(scope, receive, send)
        except ApiError as error:
            response = error_responses.logged_error_response(error, scope["path"])
            await response(scope, receive, send)
