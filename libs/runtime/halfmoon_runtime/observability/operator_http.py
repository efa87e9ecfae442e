"""Serve HTTP to operators: `/metrics`, `/health`, `/ready`, and routes of the service.

It is the standard library's WSGI server in a few threads, as in Prometheus' own client. So there
is no framework to install, and metrics are scraped even while the event loop is busy. The
service's own routes are handled on its event loop and answer JSON. Errors have the shape of the
REST API's.

    {"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": null}}

With a cluster key, all other paths need ``Authorization: Bearer`` with `operator_token`. A POST
needs ``Content-Type: application/json``, so that no web page of another origin can send it.
"""

import asyncio
import hashlib
import hmac
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, cast
from urllib.parse import parse_qsl, unquote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from halfmoon_protocol.cluster_keys import split_cluster_keys

#: Most connections at a time; further ones are closed.
_MAX_CONNECTIONS = 16
#: Seconds in which a caller must send its request.
_CALLER_S = 10.0
#: Seconds to wait for a handler: an event loop that takes longer is stuck.
_ANSWER_S = 10.0
#: Seconds until connections are accepted again after that failed.
_ACCEPT_RETRY_S = 0.05
_MAX_BODY_BYTES = 64 * 1024

_log = structlog.get_logger(__name__)


class OperatorHttpError(Exception):
    """An answer with a status other than 200, raised by a handler."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: Parameter or field at fault.
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class OperatorRequest:
    """One request of an operator, as handlers receive it."""

    #: Named parts of the path, decoded.
    parts: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


#: Handles a request; its result is sent as JSON, with status 200.
OperatorHandler = Callable[[OperatorRequest], Awaitable[object]]


def operator_token(cluster_key: str) -> str:
    """Derive the operators' bearer token from the first cluster key; "" without one."""
    return next(iter(operator_tokens(cluster_key)), "")


def operator_tokens(cluster_key: str) -> tuple[str, ...]:
    """Derive the tokens that a service accepts: one of each cluster key in the text."""
    return tuple(
        hmac.new(key.encode(), b"halfmoon operator 1", hashlib.sha256).hexdigest()
        for key in split_cluster_keys(cluster_key)
    )


def is_operator_token(shown: str, tokens: Sequence[str]) -> bool:
    """Return whether a text is one of the tokens, in constant time."""
    return any(hmac.compare_digest(shown.encode(), token.encode()) for token in tokens)


class OperatorHttp:
    """Serve one service's operators; `start` and `stop` are each called once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_ready: Callable[[], bool],
        *,
        tokens: Sequence[str] = (),
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Prepare the server; `start` listens.

        Args:
            loop: runs the handlers.
            is_ready: tells whether the service takes work.
            tokens: one of them is required, see `operator_tokens`; none: nothing is.
            registry: metrics to serve.
        """
        self._loop = loop
        self._is_ready = is_ready
        self._tokens = tokens
        self._metrics = make_wsgi_app(registry)
        #: Method, parts of the path, handler.
        self._routes: list[tuple[str, list[str], OperatorHandler]] = []
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def add(self, method: str, path: str, handler: OperatorHandler) -> None:
        """Add a handler of a path, for example ``/blocks/{hash}``."""
        self._routes.append((method, path.strip("/").split("/"), handler))

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of each added handler."""
        return [(method, "/" + "/".join(parts)) for method, parts, _ in self._routes]

    def start(self, port: int, host: str) -> None:
        """Listen on a port; 0 takes a free one.

        Raises:
            OSError: the port is not available; the text names it.
        """
        try:
            self._server = _Server(host, port, self._answer)
        except OSError as error:
            raise OSError(
                error.errno, f"metrics_port {port} on {host} can't be had: {error.strerror}"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_until_closed, name="operator-http", daemon=True
        )
        self._thread.start()

    def url(self, host: str) -> str:
        """Return the server's URL, with this name or address of the machine."""
        assert self._server is not None, "it was not started"
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.close()
            self._thread.join()

    # -- one request, in a thread of its own -------------------------------------------------

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        try:
            if path == "/metrics":
                return cast(Iterable[bytes], self._metrics(environ, start))
            answer = self._route(path, environ)
            return _respond(start, 200, answer)
        except OperatorHttpError as refused:
            error = {
                "message": refused.message,
                "type": "invalid_request_error" if refused.status < 500 else "server_error",
                "param": refused.param,
                "code": refused.code,
            }
            return _respond(start, refused.status, {"error": error}, refused.retry_after_s)

    def _route(self, path: str, environ: WSGIEnvironment) -> object:
        method = str(environ["REQUEST_METHOD"])
        if path == "/health":
            return self._on_loop(self._health())
        if path == "/ready":
            return self._on_loop(self._ready())
        asked = path.strip("/").split("/")
        allowed = {verb for verb, pattern, _ in self._routes if _match(pattern, asked) is not None}
        if not allowed:
            raise OperatorHttpError(404, f"Not Found ({method} {path})")
        if method not in allowed:
            raise OperatorHttpError(
                405, f"Method Not Allowed ({method} {path}): {', '.join(allowed)} is"
            )
        self._require_token(environ)
        for verb, pattern, handler in self._routes:
            parts = _match(pattern, asked)
            if verb == method and parts is not None:
                query = dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True))
                body = _body(environ) if method == "POST" else b""
                return self._on_loop(handler(OperatorRequest(parts, query, body)))
        raise AssertionError("a route was found and is gone")

    def _require_token(self, environ: WSGIEnvironment) -> None:
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ")
        if self._tokens and not is_operator_token(shown, self._tokens):
            raise OperatorHttpError(
                401,
                "this cluster has a key: show operator_token(key) as Authorization: Bearer",
                code="invalid_api_key",
            )

    def _on_loop(self, answer: Awaitable[object]) -> object:
        async def asked() -> object:
            return await answer

        future = asyncio.run_coroutine_threadsafe(asked(), self._loop)
        try:
            return future.result(_ANSWER_S)
        except TimeoutError:
            future.cancel()
            raise OperatorHttpError(503, f"no answer within {_ANSWER_S:.0f} s") from None
        except OperatorHttpError:
            raise
        except Exception:
            _log.exception("an operator's request failed")
            raise OperatorHttpError(500, "it failed; the log of this process says why") from None

    async def _health(self) -> object:
        return {"status": "ok"}

    async def _ready(self) -> object:
        if not self._is_ready():
            raise OperatorHttpError(503, "it takes no work: it is starting, or stopping")
        return {"status": "ready"}


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, app: Callable[..., Iterable[bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._closing = False

    def serve_until_closed(self) -> None:
        """Accept connections until `close`; unlike `serve_forever`, without waking up to check."""
        while not self._closing:
            try:
                request, client_address = self.get_request()
            except OSError:
                # The caller is gone, `close` was called, or no descriptor is left. Then the next
                # attempt would fail at once, and the next.
                time.sleep(_ACCEPT_RETRY_S)
                continue
            try:
                self.process_request(request, client_address)
            except RuntimeError:
                _log.exception("no thread can be started for an operator's connection")
                self.shutdown_request(request)

    def close(self) -> None:
        """Stop listening, which wakes the thread that accepts."""
        self._closing = True
        # A connection that is being accepted is served; then the flag is seen.
        self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # its thread, which would release, has not started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a caller that closed its connection, or took too long."""


class _Handler(WSGIRequestHandler):
    timeout = int(_CALLER_S)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _match(pattern: list[str], asked: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(asked):
        return None
    parts: dict[str, str] = {}
    for wanted, got in zip(pattern, asked, strict=True):
        if wanted.startswith("{"):
            parts[wanted.strip("{}")] = unquote(got)
        elif wanted != got:
            return None
    return parts


def _body(environ: WSGIEnvironment) -> bytes:
    kind = str(environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OperatorHttpError(
            415, f"the body is {kind or 'of no type'}: send Content-Type application/json"
        )
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        raise OperatorHttpError(400, "Content-Length is no number") from None
    if not 0 <= length <= _MAX_BODY_BYTES:
        raise OperatorHttpError(
            413, f"the body has {length} bytes, at most {_MAX_BODY_BYTES} are read"
        )
    return bytes(environ["wsgi.input"].read(length))


def _respond(
    start: StartResponse, status: int, answer: object, retry_after_s: float | None = None
) -> list[bytes]:
    body = msgspec.json.encode(answer)
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if retry_after_s is not None:
        headers.append(("Retry-After", str(max(1, math.ceil(retry_after_s)))))
    start(f"{status} {HTTPStatus(status).phrase}", headers)
    return [body]
