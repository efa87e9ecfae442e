"""HTTP/1.1 to one endpoint, light enough to be its load: h11 over asyncio's transports.

A request costs this process a fifteenth of what httpx needs for it, which leaves a core for
thousands of requests and tens of thousands of tokens a second (docs/cli.md has the figures).
What it does not have: proxies from the environment, redirects, HTTP/2.
"""

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import h11

from halfmoon_cli.endpoint.endpoint_address import CONNECT_S, ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointUnreachable, StreamBroken

#: Of an answer that is no stream, so many bytes are kept.
_MOST_BODY_BYTES = 1 << 20


class BenchHttpResponse:
    """The head of an answer, and its body where nobody takes it as it comes."""

    def __init__(self) -> None:
        #: 0 before there is one.
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""


#: Called with bytes of a body with status 200 as soon as they are there.
OnBodyPart = Callable[[bytes], None]


class _Stale(Exception):
    """A kept connection was closed before a byte of an answer came: a new one may do."""


class BenchHttpClient:
    """Connections to one endpoint, kept while they live. Use as an async context manager."""

    def __init__(self, endpoint: ApiEndpoint) -> None:
        parts = urlsplit(endpoint.api)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = [("Host", parts.netloc), *endpoint.headers.items()]
        #: Open and without a request, the one used last stands last.
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> "BenchHttpClient":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for connection in list(self._all):
            connection.close()

    async def get(self, url: str) -> BenchHttpResponse:
        """The answer to a GET of this URL, which is at the endpoint.

        Raises:
            Unreachable: nobody answers.
            StreamBroken: the answer broke off.
        """
        return await self._ask("GET", url, b"", None)

    async def post(
        self, url: str, body: bytes, take: OnBodyPart | None = None
    ) -> BenchHttpResponse:
        """The answer to this JSON, once it is complete.

        Whoever cancels this closes the connection, which the endpoint notices.

        Args:
            url: at the endpoint.
            body: JSON.
            take: gets the body of an answer with status 200; what it raises is raised here.

        Raises:
            Unreachable: nobody answers.
            StreamBroken: the answer broke off.
        """
        return await self._ask("POST", url, body, take)

    async def _ask(
        self, method: str, url: str, body: bytes, take: OnBodyPart | None
    ) -> BenchHttpResponse:
        parts = urlsplit(url)
        head = h11.Request(
            method=method,
            target=parts.path + (f"?{parts.query}" if parts.query else ""),
            headers=[
                *self._headers,
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
            ],
        )
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._open()
            try:
                answer = await connection.ask(head, body, take, kept=kept)
            except _Stale:
                continue
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return answer

    async def _open(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._gone), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise EndpointUnreachable(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise EndpointUnreachable(f"no connection: {error.strerror or error}") from error
        self._all.add(connection)
        return connection

    def _gone(self, connection: "_Connection") -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection, which has one request at a time."""

    def __init__(self, gone: Callable[["_Connection"], None]) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._over: asyncio.Future[None] | None = None
        self._take: OnBodyPart | None = None
        self._answer = BenchHttpResponse()
        self._kept = False
        self.reusable = False

    async def ask(
        self, head: h11.Request, body: bytes, take: OnBodyPart | None, *, kept: bool
    ) -> BenchHttpResponse:
        assert self._transport is not None
        self._over = asyncio.get_running_loop().create_future()
        self._answer, self._take, self._kept = BenchHttpResponse(), take, kept
        self.reusable = False
        data = self._http.send(head) or b""
        data += self._http.send(h11.Data(data=body)) or b""
        self._transport.write(data + (self._http.send(h11.EndOfMessage()) or b""))
        await self._over
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._gone(self)
        # An answer without a length ends here; any other is cut off.
        self._receive(b"")
        self._fail(StreamBroken(f"the connection was lost: {error}"))
        self.reusable = False

    def _receive(self, data: bytes) -> None:
        if self._over is None or self._over.done():
            # Nothing was asked: a server that talks now is not to be trusted with more.
            self.reusable = False
            self.close()
            return
        try:
            self._http.receive_data(data)
            while not self._over.done() and not self._handle(self._http.next_event()):
                pass
        except h11.RemoteProtocolError as error:
            self._fail(StreamBroken(f"the answer was cut off: {error}"))
        except Exception as error:
            self._fail(error)

    def _handle(self, event: object) -> bool:
        """Act on what came; whether that is all for now."""
        assert self._over is not None
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return True
        match event:
            case h11.Data():
                if self._take is not None and self._answer.status == 200:
                    self._take(bytes(event.data))
                elif len(self._answer.body) < _MOST_BODY_BYTES:
                    self._answer.body += event.data
            case h11.Response():
                self._answer.status = event.status_code
                self._answer.headers = {
                    name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers
                }
            case h11.EndOfMessage():
                if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                    self._http.start_next_cycle()
                    self.reusable = True
                self._over.set_result(None)
            case h11.ConnectionClosed():
                return True
        return False

    def _fail(self, error: Exception) -> None:
        if self._over is None or self._over.done():
            return
        if self._kept and not self._answer.status and isinstance(error, StreamBroken):
            error = _Stale()
        elif not self._answer.status and isinstance(error, StreamBroken):
            error = EndpointUnreachable("the connection was closed without an answer")
        self._over.set_exception(error)
