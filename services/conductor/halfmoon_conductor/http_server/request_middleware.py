"""Wrap all routes: name and count each request, bound its body, answer unexpected errors.

The name goes into ``X-Request-Id`` and the log.
"""

import logging
import os
import re

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from halfmoon_conductor.errors import ApiError
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.http_server.auth_middleware import is_guarded
from halfmoon_conductor.http_server.body_receiver import BodyReceiver, replay_body
from halfmoon_conductor.http_server.disconnect import ClientGone
from halfmoon_conductor.http_server.error_responses import CLIENT_GONE_STATUS
from halfmoon_conductor.http_server.headers import header_of
from halfmoon_conductor.observability.metrics.http_metrics import HttpMetrics

#: A client's request id goes into logs and headers: short, without spaces and control characters.
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
#: Unguarded routes read no body with other methods.
_WITH_BODIES = ("POST", "PUT", "PATCH")

_log = structlog.get_logger(__name__)
#: Asked whether a line for each request is written: binding a logger in vain costs more.
_levels = logging.getLogger(__name__)


class RequestMiddleware:
    """The outermost middleware of the app.

    Args:
        app: the app to wrap.
        bodies: bounds request bodies. Longer ones are refused with 413, unread if the header
            declares their length.
    """

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, bodies: BodyReceiver) -> None:
        self._app = app
        self._metrics = metrics
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = header_of(scope, b"x-request-id")
        request_id = offered if _REQUEST_ID.fullmatch(offered) else f"req-{os.urandom(16).hex()}"
        # Each request has a task, and so a context, of its own: nothing is to be restored.
        structlog.contextvars.bind_contextvars(http_request_id=request_id)
        reply = _Reply(send, request_id)
        self._metrics.n_in_flight += 1
        try:
            self._bodies.check_content_length(scope)
            if scope["method"] in _WITH_BODIES and not is_guarded(scope["path"]):
                await self._serve_unguarded(scope, receive, reply)
            else:
                await self._app(scope, receive, reply)
        except ApiError as error:
            if reply.status:
                raise
            response = error_responses.error_response(error, scope["path"])
            # The rest of the body is not worth reading.
            response.headers["connection"] = "close"
            await response(scope, receive, reply)
        except ClientGone:
            _log.info("client gone in mid-stream" if reply.status else "client gone")
            if not reply.status:
                await Response(status_code=CLIENT_GONE_STATUS)(scope, receive, reply)
        except Exception:
            if reply.status:
                raise  # the server closes the connection: the client sees a broken answer
            _log.exception("internal error", path=scope["path"])
            await error_responses.internal_error(scope["path"])(scope, receive, reply)
        finally:
            self._metrics.n_in_flight -= 1
            route = _route(scope)
            self._metrics.on_answered(route, reply.status)
            if _levels.isEnabledFor(logging.DEBUG):
                _log.debug("answered", route=route, status=reply.status)

    async def _serve_unguarded(self, scope: Scope, receive: Receive, reply: "_Reply") -> None:
        body = self._bodies.open()
        try:
            await body.read(receive)
            await self._app(scope, replay_body(scope, body, receive), reply)
        finally:
            body.release()


class _Reply:
    """Send a response, remember its status and add the request id to its headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        #: 0 until the response has started.
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = (b"x-request-id", self._request_id.encode())
            message["headers"] = [*message.get("headers", ()), named]
        await self._send(message)


def _route(scope: Scope) -> str:
    """Return the route's pattern; clients' own paths would make unbounded labels."""
    return getattr(scope.get("route"), "path", None) or "unmatched"
