"""Trace HTTP requests: each request's span is the root of all its spans here.

The span continues the trace of the client's `traceparent`, obeys its sampled flag, and is named in
`traceresponse`. Names of attributes are OpenTelemetry's for HTTP servers. The middleware is
installed only where tracing is on.
"""

from collections.abc import Callable
from contextvars import ContextVar

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfmoon_runtime.clock import Clock
from halfmoon_runtime.observability.tracing import Span, Tracer

#: Span of the HTTP request that this task serves; None: it is not traced.
current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)


class TracingMiddleware:
    """Trace the requests of an app."""

    def __init__(
        self, app: ASGIApp, *, tracer: Tracer, clock: Clock, is_traced: Callable[[str], bool]
    ) -> None:
        """Wrap an app.

        Args:
            app: the app.
            tracer: opens the spans.
            clock: gives their times.
            is_traced: whether requests for a path are traced.
        """
        self._app = app
        self._is_traced = is_traced
        self._tracer = tracer
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not self._is_traced(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        span = self._tracer.serve(
            scope["method"], headers.getlist, self._clock.now(), _request_attributes(scope, headers)
        )
        if span is None:
            await self._app(scope, receive, send)
            return
        reply = _Reply(send, span)
        token = current_span.set(span)
        trace_id = span.context.traceparent.split("-")[1]
        error = "cancelled"
        try:
            with structlog.contextvars.bound_contextvars(trace_id=trace_id):
                await self._app(scope, receive, reply)
            error = ""
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            current_span.reset(token)
            self._end(span, scope, reply.status, error)

    def _end(self, span: Span, scope: Scope, status: int, error: str) -> None:
        if route := getattr(scope.get("route"), "path", None):
            span.set({"http.route": route})
            span.rename(f"{scope['method']} {route}")
        if status:
            span.set({"http.response.status_code": status})
        if status >= 500 and not error:
            error = str(status)
        if error:
            span.set({"error.type": error})
        span.end(self._clock.now(), error)


class _Reply:
    """Send a response, remember its status and add the trace to its headers."""

    def __init__(self, send: Send, span: Span) -> None:
        self._send = send
        self._span = span
        #: 0 until the response has started.
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = Headers(scope=message)
            self._span.set({"halfmoon.http_request_id": headers.get("x-request-id", "")})
            traceparent = self._span.context.traceparent.encode("ascii")
            message = {**message, "headers": [*message["headers"], (b"traceresponse", traceparent)]}
        await self._send(message)


def _request_attributes(scope: Scope, headers: Headers) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "user_agent.original": headers.get("user-agent", ""),
    }
    if scope.get("server"):
        attributes["server.address"], attributes["server.port"] = scope["server"]
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    return attributes
