"""Serve HTTP to operators: `/metrics`, `/health`, `/ready`, and routes of the service.

It is the standard library's WSGI server in a few threads, as in Prometheus' own client. So there
is no framework to install, and metrics are scraped even while the event loop is busy. The
service's own routes are handled on its event loop and answer JSON. Errors have the shape of the
REST API's.

    {"error": {"message": "…", "type": "invalid_request_error", "param": null, "code": null}}

With a certificate it serves TLS alone. The handshake is in the caller's thread, has a limit of
time, and counts as a connection.

With a cluster key, all other paths need ``Authorization: Bearer`` with an operators' token. HEAD is
answered wherever GET is. A wrong method is answered with 405 and ``Allow``. A POST needs
``Content-Type: application/json``, so that no web page of another origin can send it. Where hosts
are checked, all but the probes is refused with 421 under a name that is not the server's.

A connection has one request, by HTTP/1.0: none is kept idle.
"""

import asyncio
import math
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app

from halfmoon_metadata.port_holder import port_refusal
from halfmoon_runtime.allowed_hosts import AllowedHosts, BadHostHeader, host_of
from halfmoon_runtime.observability.operator_tokens import is_operator_token
from halfmoon_runtime.observability.route_doc import RouteDoc

#: Most connections at a time; further ones are closed.
_MAX_CONNECTIONS = 16
#: Seconds in which a caller must send its request.
_CALLER_S = 10.0
#: Seconds to wait for a handler: an event loop that takes longer is stuck.
_ANSWER_S = 10.0
#: Seconds until connections are accepted again after that failed.
_ACCEPT_RETRY_S = 0.05
_MAX_BODY_BYTES = 64 * 1024
#: Paths that need no token, and take GET alone.
_OPEN_PATHS = ("/metrics", "/health", "/ready")
#: Paths that are answered under any name.
_PROBES = ("/health", "/ready")
#: Where `_Handler` hands on all Host headers: WSGI joins several to one text.
_HOSTS_KEY = "halfmoon.hosts"
#: The field that a message of msgspec names: of a wrong value, or of an unknown or missing field.
_FIELD = re.compile(r"at `\$\.([A-Za-z0-9_]+)|field `([A-Za-z0-9_]+)`")

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
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: Parameter or field at fault.
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))


@dataclass(frozen=True)
class OperatorRequest:
    """One request of an operator, as handlers receive it."""

    #: Named parts of the path, decoded.
    parts: Mapping[str, str]
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


#: Handles a request; its result is sent as JSON, with status 200.
OperatorHandler = Callable[[OperatorRequest], Awaitable[object]]


@dataclass(frozen=True)
class OperatorRoute:
    """One method of one path, with its handler and its description."""

    method: str
    path: str
    handler: OperatorHandler
    doc: RouteDoc | None = None

    @property
    def steps(self) -> list[str]:
        """The path's parts, named ones in braces."""
        return self.path.strip("/").split("/")


_Body = TypeVar("_Body")


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a JSON body.

    Raises:
        OperatorHttpError: it is no such thing; names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        named = _FIELD.search(str(error))
        raise OperatorHttpError(
            400, f"wrong body: {error}", param=(named[1] or named[2]) if named else None
        ) from None


class OperatorHttp:
    """Serve one service's operators; `start` and `stop` are each called once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        is_ready: Callable[[], bool],
        *,
        tokens: Sequence[str] = (),
        hosts: AllowedHosts | None = None,
        registry: CollectorRegistry = REGISTRY,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare the server; `start` listens.

        Args:
            loop: runs the handlers.
            is_ready: tells whether the service takes work.
            tokens: one of them is required, see `operator_tokens`; none: nothing is.
            hosts: names that requests may be for; None: any.
            registry: metrics to serve.
            tls: serves TLS alone; None: HTTP in the clear.
        """
        self._loop = loop
        self._is_ready = is_ready
        self._tokens = tokens
        self._hosts = hosts
        self._tls = tls
        self._metrics = make_wsgi_app(registry)
        #: What hinders the service, for `/health` and `/ready`; empty: nothing that it knows.
        self.problem = ""
        self._routes: list[OperatorRoute] = []
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def add(
        self, method: str, path: str, handler: OperatorHandler, doc: RouteDoc | None = None
    ) -> None:
        """Add a handler of a path, for example ``/blocks/{hash}``.

        Args:
            method: "GET" or "POST".
            path: named parts are in braces.
            handler: answers.
            doc: describes the route; with it, unknown parameters are refused.
        """
        self._routes.append(OperatorRoute(method, path, handler, doc))

    @property
    def routes(self) -> list[OperatorRoute]:
        """All that was added."""
        return self._routes

    def start(self, port: int, host: str) -> None:
        """Listen on a port; 0 takes a free one.

        Raises:
            OSError: the port is not available; the text names it.
        """
        try:
            self._server = _Server(host, port, self._answer, self._tls)
        except OSError as error:
            text = port_refusal("metrics_port", port, host, error)
            raise OSError(error.errno, text) from error
        self._thread = threading.Thread(
            target=self._server.serve_until_closed, name="operator-http", daemon=True
        )
        self._thread.start()

    def url(self, host: str) -> str:
        """Return the server's URL, with this name or address of the machine."""
        assert self._server is not None, "it was not started"
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._server.server_port}"

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.close()
            self._thread.join()

    # -- one request, in a thread of its own -------------------------------------------------

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        # WSGI hands on the bytes of the path as if they were Latin-1.
        path = environ.get("PATH_INFO", "/").encode("latin-1").decode(errors="replace")
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        try:
            self._check_host(environ, path)
            if path == "/metrics":
                _require_method(str(environ["REQUEST_METHOD"]), path, {"GET"})
                environ["REQUEST_METHOD"] = "GET"
                metrics = cast(Iterable[bytes], self._metrics(environ, start))
                return [] if is_head else metrics
            answer = self._route(path, environ)
            body = _respond(start, 200, answer)
        except OperatorHttpError as refused:
            error = {
                "message": refused.message,
                "type": "invalid_request_error" if refused.status < 500 else "server_error",
                "param": refused.param,
                "code": refused.code,
            }
            body = _respond(start, refused.status, {"error": error}, refused.headers)
        return [] if is_head else body

    def _route(self, path: str, environ: WSGIEnvironment) -> object:
        method = str(environ["REQUEST_METHOD"])
        if path in _OPEN_PATHS:
            _require_method(method, path, {"GET"})
            return self._on_loop(self._health() if path == "/health" else self._ready())
        asked = path.strip("/").split("/")
        found = [route for route in self._routes if _match(route.steps, asked) is not None]
        if not found:
            raise OperatorHttpError(404, f"Not Found ({method} {path})")
        _require_method(method, path, {route.method for route in found})
        self._require_token(environ)
        verb = "GET" if method == "HEAD" else method
        route = next(route for route in found if route.method == verb)
        query = _query(environ, route.doc)
        body = _body(environ) if method == "POST" else b""
        request = OperatorRequest(_match(route.steps, asked) or {}, query, body)
        return self._on_loop(route.handler(request))

    def _check_host(self, environ: WSGIEnvironment, path: str) -> None:
        version = str(environ.get("SERVER_PROTOCOL", "")).removeprefix("HTTP/")
        try:
            host = host_of(environ.get(_HOSTS_KEY, []), version)
        except BadHostHeader as error:
            raise OperatorHttpError(400, str(error)) from None
        if self._hosts is None or host is None or path in _PROBES:
            return
        if not self._hosts.allows(host):
            raise OperatorHttpError(421, self._hosts.refusal(host), code="host_not_allowed")

    def _require_token(self, environ: WSGIEnvironment) -> None:
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ")
        if self._tokens and not is_operator_token(shown, self._tokens):
            raise OperatorHttpError(
                401,
                "this cluster has a key: show operator_token(key) as Authorization: Bearer",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
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
        return self._with_problem("ok")

    async def _ready(self) -> object:
        if not self._is_ready():
            raise OperatorHttpError(503, "it takes no work: it is starting, or stopping")
        return self._with_problem("ready")

    def _with_problem(self, status: str) -> object:
        return {"status": status, "problem": self.problem} if self.problem else {"status": status}


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        app: Callable[..., Iterable[bytes]],
        tls: ssl.SSLContext | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)
        self.set_app(app)
        self._closing = False
        self._tls = tls

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
            if self._tls is not None:
                request = _shake_hands(request, self._tls)
            super().process_request_thread(request, client_address)
        except OSError:  # a handshake that failed, or took too long
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a caller that closed its connection, or took too long."""


def _shake_hands(connection: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
    """Return the connection after its TLS handshake.

    The time is that of the whole handshake: a caller that sends byte after byte has no more.

    Raises:
        OSError: it fails, or takes too long; the connection is closed.
    """
    deadline = time.monotonic() + _CALLER_S
    secured = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    try:
        secured.setblocking(False)
        while True:
            try:
                secured.do_handshake()
                break
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            poll = select.poll()
            poll.register(secured, wanted)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no TLS handshake within {_CALLER_S:.0f} s")
        secured.setblocking(True)
    except BaseException:
        secured.close()
        raise
    return secured


class _Handler(WSGIRequestHandler):
    timeout = int(_CALLER_S)

    def get_environ(self) -> WSGIEnvironment:
        """Return a request's environment, with all its Host headers."""
        return {**super().get_environ(), _HOSTS_KEY: self.headers.get_all("host", [])}

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _require_method(method: str, path: str, allowed: set[str]) -> None:
    """Raise an `OperatorHttpError` unless the method is allowed; HEAD is where GET is."""
    if "GET" in allowed:
        allowed = allowed | {"HEAD"}
    if method not in allowed:
        listed = ", ".join(sorted(allowed))
        raise OperatorHttpError(
            405, f"Method Not Allowed ({method} {path}): {listed}", headers={"Allow": listed}
        )


def _query(environ: WSGIEnvironment, doc: RouteDoc | None) -> dict[str, str]:
    text = str(environ.get("QUERY_STRING", ""))
    try:
        query = dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
    except (UnicodeDecodeError, ValueError):
        raise OperatorHttpError(400, "the query is not UTF-8 in percent codes") from None
    unknown = sorted(query.keys() - doc.query.keys()) if doc is not None else []
    if unknown:
        name = unknown[0][:80]
        raise OperatorHttpError(400, f"{name!r} is no parameter of this path", param=name)
    return query


def _match(pattern: list[str], asked: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(asked):
        return None
    parts: dict[str, str] = {}
    for wanted, got in zip(pattern, asked, strict=True):
        if wanted.startswith("{"):
            parts[wanted.strip("{}")] = got
        elif wanted != got:
            return None
    return parts


def _body(environ: WSGIEnvironment) -> bytes:
    kind = str(environ.get("CONTENT_TYPE", "")).partition(";")[0].strip().lower()
    if kind != "application/json":
        raise OperatorHttpError(
            415, f"the body is {kind or 'of no type'}: send Content-Type application/json"
        )
    if "HTTP_TRANSFER_ENCODING" in environ:
        raise OperatorHttpError(411, "send the body with its Content-Length, in one piece")
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
    start: StartResponse, status: int, answer: object, headers: Mapping[str, str] | None = None
) -> list[bytes]:
    body = msgspec.json.encode(answer)
    about = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    start(f"{status} {HTTPStatus(status).phrase}", [*about.items(), *(headers or {}).items()])
    return [body]
