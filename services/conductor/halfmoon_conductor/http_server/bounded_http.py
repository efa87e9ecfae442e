"""Serve HTTP/1.1 connections with bounds on what arrives before an app is called.

httptools collects a header of any length, and uvicorn any number of headers, URL bytes, chunks and
pipelined requests. This protocol counts each of them while it arrives. What is over a limit is
answered, and the connection closed, before an app sees it:

    connection ──first byte──► head ──blank line──► body ──last byte──► served, next head
        └── 408 after `head_timeout_s` ──┘ 431, 414      └── 413: too many chunks

A request also needs one Host header, which names a host of this server where hosts are checked.
An answered connection is kept for `keep_alive_s`, and less long when there are too many: a new one
takes the place of the one that has been idle for the longest time.

Content, length and pace of a body are not checked here: see `body_receiver`. A client that takes
nothing of its answer for `unread_s`, though bytes wait for it, loses the connection: its request
holds a place in a decode worker's batch. So does a client that vanished without a word, as a host
without power does: the kernel asks after it (tcp(7)).
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, ClassVar, NoReturn, cast

import httptools
import msgspec
import structlog
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from halfmoon_conductor.errors import (
    ApiError,
    BodyTooLarge,
    HeadTooLarge,
    HostNotAllowed,
    InvalidRequest,
    RequestTimedOut,
    ServerOverloaded,
    UrlTooLong,
)
from halfmoon_conductor.http_server import error_responses
from halfmoon_conductor.http_server.disconnect import show_connection
from halfmoon_conductor.http_server.idle_connections import IdleConnections
from halfmoon_conductor.http_server.tls_gate import TlsGate
from halfmoon_conductor.http_server.unchunked import unchunked
from halfmoon_runtime.allowed_hosts import AllowedHosts, BadHostHeader, host_of, read_host

#: Bytes around a chunk of a body: its length in hexadecimal, and two line ends.
_CHUNK_OVERHEAD = 20
#: Seconds without a packet until the kernel asks after a client, between two such questions, and
#: how many stay without an answer.
_PROBE_AFTER_S, _PROBE_INTERVAL_S, _PROBES = 60, 10, 6
#: Seconds in which a client may acknowledge nothing of what was sent: as long as all that.
_UNACKNOWLEDGED_S = _PROBE_AFTER_S + _PROBES * _PROBE_INTERVAL_S
#: Bytes that the kernel takes for a client beyond what is on its way.
_UNSENT_BYTES = 64 * 1024
#: Bytes of a body that are still read after its request was answered, to keep the connection.
_UNREAD_BYTES = 64 * 1024
_RETRY_S = 1.0
#: Characters of a name in the log.
_SHOWN = 100
#: Paths that are answered under any name: they tell no more than that the server is there.
_OPEN_PATHS = (b"/health", b"/ping", b"/ready")

_log = structlog.get_logger(__name__)


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one connection."""

    #: Request line and headers together, with the trailers of a chunked body.
    max_head_bytes: int = 64 * 1024
    max_headers: int = 128
    max_url_bytes: int = 8 * 1024
    #: Chunks of one body.
    max_chunks: int = 65_536
    #: Pipelined requests: sent before the previous one was answered.
    max_pipelined: int = 8
    max_connections: int = 16_384
    #: Seconds from the connection, or from the first byte of a later request, to the end of its
    #: headers; also to the end of a TLS handshake.
    head_timeout_s: float = 20.0
    #: Seconds that a connection is kept without a request, longer than a load balancer keeps it:
    #: one that is closed as a request is sent on it loses that request.
    keep_alive_s: float = 75.0
    #: Seconds that a refused client which is still sending gets to read the answer.
    linger_s: float = 2.0
    #: Seconds in which a client may take nothing of an answer while bytes of it wait. The system's
    #: buffers are full by then: they hold a short answer whole.
    unread_s: float = 60.0


class BoundedHttp(HttpToolsProtocol):
    """One connection; `bounded_http` makes the class for given limits."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    #: Names that requests may be for; None: any.
    hosts: ClassVar[AllowedHosts | None] = None
    #: Connections of this server that wait for their next request.
    idle: ClassVar[IdleConnections]
    #: The connection as it was counted during its TLS handshake; None in the clear.
    gate: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of a new connection, and refuse it if there are too many at work."""
        #: Whether the connection is closing, so that arriving data is discarded.
        self._ignores_data = False
        #: Counters of the message being read: raw bytes, body bytes, chunks, headers and header
        #: bytes. Raw bytes that came in one read with the message's first bytes are not counted.
        self._n_raw = self._n_body = self._n_chunks = self._n_headers = self._n_header_bytes = 0
        self._is_in_head = self.is_receiving = False
        #: See `ClientConnection`.
        self.is_lost = False
        self.on_gone: Callable[[], None] | None = None
        #: The error that a parser callback found in the message.
        self._error: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        _notice_vanished_client(transport.get_extra_info("socket"))
        closable = cast(asyncio.Transport, _LingeringTransport(transport, self._linger))
        super().connection_made(closable)
        self.url = b""
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]
        self.connections.discard(self.gate)
        self._set_timer()
        n_over = len(self.connections) - self.limits.max_connections
        if n_over > 0 and not self.idle.make_room(self.connections):
            self._refuse(
                ServerOverloaded(
                    f"{self.limits.max_connections} connections are open, the most that are taken.",
                    _RETRY_S,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a lost connection."""
        self._ignores_data = True
        self.idle.discard(self)
        self._unset_timer()
        self._unset_unread_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._tell_gone()

    def pause_writing(self) -> None:
        """Give the client a time to take some of what waits for it."""
        super().pause_writing()
        self._set_unread_timer()

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._unset_unread_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Count and parse arriving data."""
        if self._ignores_data:
            return
        self._n_raw += len(data)
        super().data_received(data)
        self._note_idleness()
        n_around = self._n_raw - self._n_body
        if n_around > self.limits.max_head_bytes + self._n_chunks * _CHUNK_OVERHEAD:
            self._refuse(self._head_too_large())
        elif self._is_in_head and self._timer is None:
            self._set_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or that a callback below rejected."""
        self._refuse(self._error or InvalidRequest(msg))

    # -- parser callbacks: raising ends the parsing, and `send_400_response` follows

    def on_message_begin(self) -> None:
        """Start counting a request."""
        if len(self.pipeline) >= self.limits.max_pipelined:
            self._abort_parsing(
                InvalidRequest(f"Over {self.limits.max_pipelined} requests sent ahead.")
            )
        self._n_raw = self._n_body = self._n_chunks = self._n_headers = self._n_header_bytes = 0
        self._is_in_head = self.is_receiving = True
        super().on_message_begin()
        show_connection(cast(MutableMapping[str, Any], self.scope), self)

    def on_url(self, url: bytes) -> None:
        """Check the URL's length."""
        if len(self.url) + len(url) > self.limits.max_url_bytes:
            self._abort_parsing(
                UrlTooLong(f"The URL is over {self.limits.max_url_bytes} bytes, the most taken.")
            )
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer after a chunked body."""
        self._n_headers += 1
        self._n_header_bytes += len(name) + len(value)
        if self._n_headers > self.limits.max_headers:
            self._abort_parsing(
                HeadTooLarge(
                    f"The request has over {self.limits.max_headers} headers, the most taken."
                )
            )
        if self._n_header_bytes > self.limits.max_head_bytes:
            self._abort_parsing(self._head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the host, and hand the request to the app."""
        self._check_host()
        self._is_in_head = False
        self._unset_timer()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the app's answer to a request, in the form that the client's version knows."""
        if cycle.scope["http_version"] < "1.1":
            app = cast(ASGI3Application, unchunked(cycle, cast(ASGIApp, app)))
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Count a chunk of the body."""
        self._n_body += len(body)
        self._n_chunks += 1
        if self._n_chunks > self.limits.max_chunks:
            self._abort_parsing(
                BodyTooLarge(f"The body has over {self.limits.max_chunks} pieces, the most taken.")
            )
        if self.cycle.response_complete and self._n_body > _UNREAD_BYTES:
            self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self.is_receiving = False
        self._unset_timer()
        super().on_message_complete()

    def _check_host(self) -> None:
        try:
            host = host_of(
                [str(value, "latin-1") for name, value in self.headers if name == b"host"],
                self.parser.get_http_version(),
            )
            if not self.url.startswith(
                b"/"
            ):  # it is a whole URL, whose host is the one that counts
                named = str(httptools.parse_url(self.url).host or b"", "latin-1")
                host = read_host(f"[{named}]" if ":" in named else named)
        except BadHostHeader as error:
            self._abort_parsing(InvalidRequest(str(error)))
        path = self.url.partition(b"?")[0]
        if self.hosts is None or host is None or path in _OPEN_PATHS or self.hosts.allows(host):
            return
        _log.warning("host_not_allowed", host=host[:_SHOWN])
        self._abort_parsing(HostNotAllowed(self.hosts.refusal(host)))

    # -- idle connections ----------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Limit the time for the rest of the body, now that the request is answered."""
        super().on_response_complete()
        if self.is_receiving and self._timer is None:
            self._set_timer()
        self._note_idleness()

    def _note_idleness(self) -> None:
        """Keep the timer of an idle connection: bytes that begin no request end no idleness."""
        is_idle = (
            self.cycle is not None
            and self.cycle.response_complete
            and not (self.pipeline or self._is_in_head or self.is_receiving)
            and not self.transport.is_closing()
        )
        if not is_idle:
            self.idle.discard(self)
            return
        until_s = self.idle.add(self, self.loop.time() + self.limits.keep_alive_s)
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_at(
                until_s, self.timeout_keep_alive_handler
            )

    # -- closing -----------------------------------------------------------------------------

    def _abort_parsing(self, error: ApiError) -> NoReturn:
        self._error = error
        raise _ParsingAborted

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and close.

        Only close, if the answer would be read as another request's.
        """
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_served = cycle is not None and not cycle.response_complete
        if is_served and (self._is_in_head or self.pipeline or cycle.response_started):
            self.is_receiving = False  # without an answer, none can be lost
            self.transport.close()
            return
        if is_served:
            cycle.disconnected = True
            cycle.message_event.set()
            self._tell_gone()
        self.is_receiving = True  # more may be on its way
        path = str(self.url.partition(b"?")[0], "latin-1")
        response = error_responses.error_response(error, path)
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", "connection: close"]
        head += [f"{name}: {value}" for name, value in response.headers.items()]
        body = b"" if self.parser.get_method() == b"HEAD" else bytes(response.body)
        self.transport.write("\r\n".join([*head, "\r\n"]).encode() + body)
        self.transport.close()

    def _tell_gone(self) -> None:
        """Tell the request that is being answered that its client is gone."""
        self.is_lost = True
        if self.on_gone is not None:
            self.on_gone()

    def _linger(self, transport: asyncio.Transport) -> None:
        """Close once the client stops sending; otherwise it would lose the answer unread."""
        if self._ignores_data:
            return
        self._ignores_data = True
        self._unset_timer()
        if not self.is_receiving:
            transport.close()
            return
        if transport.can_write_eof():  # TLS has no end of one direction alone
            transport.write_eof()
        transport.resume_reading()
        self._timer = self.loop.call_later(self.limits.linger_s, transport.close)

    def _head_too_large(self) -> ApiError:
        return HeadTooLarge(
            f"The request's headers are over {self.limits.max_head_bytes} bytes, the most taken."
        )

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self.limits.head_timeout_s, self._on_timer)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_unread_timer(self) -> None:
        n_waiting = self.transport.get_write_buffer_size()
        limit_s = self.limits.unread_s
        self._unread_timer = self.loop.call_later(limit_s, self._on_unread_timer, n_waiting)

    def _unset_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _on_unread_timer(self, n_before: int) -> None:
        if self.transport.get_write_buffer_size() < n_before:
            self._set_unread_timer()  # it reads, slowly
            return
        _log.warning("answer_not_read", unread_s=self.limits.unread_s, n_waiting=n_before)
        self.transport.abort()

    def _on_timer(self) -> None:
        self._timer = None
        if not self._is_in_head:
            self.transport.close()
            return
        limit_s = self.limits.head_timeout_s
        self._refuse(
            RequestTimedOut(f"The request's headers were not complete after {limit_s:g} s.")
        )


class _ParsingAborted(Exception):
    """Raised in a callback to end the parsing."""


class _LingeringTransport:
    """Wrap a transport to replace its `close`."""

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[asyncio.Transport], None]
    ) -> None:
        self._transport = transport
        self._close = close
        self._is_closing = False
        # Bound directly: each token's write costs no extra call.
        self.write = transport.write

    def close(self) -> None:
        """Close through the given function, once."""
        if not self._is_closing:
            self._is_closing = True
            self._close(self._transport)

    def is_closing(self) -> bool:
        """Return whether it is closed or closing."""
        return self._is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _notice_vanished_client(connection: socket.socket) -> None:
    """Let the kernel break a connection to a client that does not answer, and buffer little."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_AFTER_S),
        (socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_S * 1000),
        # A client that takes nothing shows soon, and not when megabytes wait for it in the kernel.
        (socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def bounded_http(
    limits: HttpLimits, tls: ssl.SSLContext | None = None, hosts: AllowedHosts | None = None
) -> type[asyncio.Protocol]:
    """Make the connection class that uvicorn is to use for one server.

    Args:
        limits: of each connection.
        tls: certificate and key; None: HTTP in the clear.
        hosts: names that requests may be for; None: any.
    """
    idle = IdleConnections()
    http = type("LimitedHttp", (BoundedHttp,), {"limits": limits, "hosts": hosts, "idle": idle})
    if tls is None:
        return http
    context = tls

    class LimitedTls(TlsGate):
        def __init__(self, *, server_state: ServerState, **arguments: Any) -> None:
            def make_http() -> BoundedHttp:
                secured: BoundedHttp = http(server_state=server_state, **arguments)
                secured.gate = self
                return secured

            super().__init__(
                make_http,
                server_state.connections,
                context,
                idle,
                max_connections=limits.max_connections,
                handshake_s=limits.head_timeout_s,
            )

    return LimitedTls
