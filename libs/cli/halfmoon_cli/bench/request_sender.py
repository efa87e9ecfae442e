"""Send the requests of a load and read their streamed answers, with aiohttp.

aiohttp rather than httpx, which the other commands use: a request of 512 tokens took this
process 0.1 ms of processor time through aiohttp and 1.5 ms through httpx, a streamed token
15 µs and 73 µs. A load generator must not be the slower side.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import aiohttp

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.endpoint.endpoint_address import CONNECT_S, ApiEndpoint
from halfmoon_cli.endpoint.endpoint_client import endpoint_trust
from halfmoon_cli.endpoint.endpoint_errors import (
    EndpointError,
    EndpointUnreachable,
    StreamBroken,
    refusal_error,
)
from halfmoon_cli.endpoint.sse_events import SseReader
from halfmoon_cli.endpoint.stream_chunks import DONE, StreamUsage, read_chunk
from halfmoon_metadata.tls_trust import certificate_problem

#: Bytes of a refusal that are read.
_MOST_REFUSAL_BYTES = 1 << 20


class RequestSender:
    """Connections to one endpoint, kept for further requests. An async context manager.

    Args:
        endpoint: of /v1/completions.
        clock: seconds since the start of the run.
        limit_s: a request that takes longer has failed.
    """

    def __init__(
        self, endpoint: ApiEndpoint, clock: Callable[[], float], *, limit_s: float
    ) -> None:
        self._endpoint = endpoint
        self._url = f"{endpoint.api}/completions"
        self._clock = clock
        self._limit_s = limit_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_on_reused_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=endpoint_trust(self._endpoint) or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={
                **self._endpoint.headers,
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
            },
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, body: bytes, record: BenchRecord) -> None:
        """Send a request and record its course. Raises no error of the endpoint."""
        record.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._limit_s):
                await self._read_answer(body, record)
        except TimeoutError:
            record.finish(self._clock(), "failed", f"not over within {self._limit_s:g} s")
        except EndpointError as error:
            record.finish(self._clock(), "failed", str(error))

    async def _read_answer(self, body: bytes, record: BenchRecord) -> None:
        """Send a request, again where the endpoint had closed a kept connection.

        Raises:
            EndpointUnreachable: no answer began.
            StreamBroken: the answer did not end as it should.
        """
        assert self._session is not None
        while True:
            reused: list[bool] = []
            record.status = 0
            try:
                async with self._session.post(
                    self._url, data=body, allow_redirects=False, trace_request_ctx=reused
                ) as response:
                    record.status = response.status
                    if response.status == 200:
                        await self._read_stream(response.content, record)
                    else:
                        await self._read_refusal(response, record)
                    return
            except aiohttp.ConnectionTimeoutError:
                raise EndpointUnreachable(f"no connection within {CONNECT_S:g} s") from None
            except aiohttp.ClientConnectorError as error:
                reason = certificate_problem(error) or str(error)
                raise EndpointUnreachable(f"no connection: {reason}") from error
            except aiohttp.ClientError as error:
                if record.status or isinstance(error, aiohttp.ClientResponseError):
                    raise StreamBroken(f"the answer was cut off: {error}") from error
                if not reused:
                    raise EndpointUnreachable(
                        "the connection was closed without an answer"
                    ) from error

    async def _read_stream(self, content: aiohttp.StreamReader, record: BenchRecord) -> None:
        events = SseReader()
        finish_reason = ""
        usage: StreamUsage | None = None
        async for piece in content.iter_any():
            at_s = self._clock()
            for data in events.feed(piece):
                if data == DONE:
                    continue
                chunk = read_chunk(data)
                if chunk.has_tokens:
                    record.on_token(at_s)
                finish_reason = chunk.finish_reason or finish_reason
                usage = chunk.usage or usage
        if usage is not None:
            record.n_prompt, record.n_cached = usage.prompt_tokens, usage.n_cached
            record.n_out = usage.n_out or record.n_out
        if not finish_reason:
            raise StreamBroken("the stream ended without a reason")
        if record.first_s is None:
            raise StreamBroken("no token came")
        record.finish(self._clock(), "finished")

    async def _read_refusal(self, response: aiohttp.ClientResponse, record: BenchRecord) -> None:
        body = await response.content.read(_MOST_REFUSAL_BYTES)
        error = refusal_error(response.status, response.headers, body)
        reason = f"{error.status} {error.code or error.reason}"
        record.has_retry_after = "Retry-After" in response.headers
        record.finish(self._clock(), "refused", reason)


async def _on_reused_connection(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any
) -> None:
    context.trace_request_ctx.append(True)
