"""Speak HTTP with one server: its description, its load, and streams of tokens.

Each answer is bounded in bytes and in time. Closing a stream before its end closes the connection,
by which the server stops the request.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import aiohttp
import msgspec

from halfmoon_servers.client.answer_chunks import (
    ChunkAborted,
    ChunkGarbage,
    ChunkRefused,
    CompletionReader,
    SglangReader,
    read_error,
    read_pair_prefill,
)
from halfmoon_servers.client.describe_server import (
    DescriptionGarbage,
    ModelEntry,
    read_event_sources,
    read_models,
    read_sglang_info,
    read_version,
    sglang_event_endpoints,
)
from halfmoon_servers.client.event_stream import DONE, EventLines, EventTooLong
from halfmoon_servers.client.generate_call import GenerateCall, GeneratedTokens, PairPrefill
from halfmoon_servers.client.metrics_page import MetricsGarbage, read_cache_blocks, read_load
from halfmoon_servers.client.pair_bodies import prefill_body, release_body
from halfmoon_servers.client.server_bodies import (
    COMPLETIONS,
    SGLANG_GENERATE,
    check_servable,
    completions_body,
    sglang_body,
)
from halfmoon_servers.client.server_description import ReportedLoad, ServerDescription
from halfmoon_servers.client.server_errors import (
    AnswerBroken,
    ServerError,
    ServerGarbage,
    ServerGone,
    ServerRefused,
    ServerTooSlow,
)

#: The longest wait that a server's Retry-After may ask for.
MAX_RETRY_AFTER_S = 60.0
_MAX_ERROR_BYTES = 64 * 1024
#: Shorter than uvicorn's 5 s, after which a server closes an idle connection.
_KEEP_ALIVE_S = 3.0


@dataclass(frozen=True)
class ClientLimits:
    """Bounds of the answers of one server, in seconds and bytes."""

    connect_timeout_s: float = 5.0
    #: From a request to the first byte of its answer, the wait in the server's queue included.
    first_byte_timeout_s: float = 600.0
    #: Between two pieces of an answer.
    idle_timeout_s: float = 120.0
    #: For descriptions, loads and health.
    status_timeout_s: float = 10.0
    max_event_bytes: int = 2**20
    max_body_bytes: int = 16 * 2**20
    #: Connections at a time; 0: as many as there are requests.
    max_connections: int = 0


class ServerClient:
    """One server, spoken with from one event loop."""

    def __init__(
        self, url: str, *, api_key: str | None = None, limits: ClientLimits | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.limits = limits or ClientLimits()
        #: What `describe` has returned last.
        self.description: ServerDescription | None = None
        #: Until when the server wants no request, by the loop's clock.
        self._refuses_until = 0.0
        self._refused: ServerRefused | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self.limits.max_connections, keepalive_timeout=_KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self.limits.connect_timeout_s, sock_read=None
            ),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> "ServerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; answers that are still streaming end with `AnswerBroken`."""
        await self._session.close()

    async def describe(self) -> ServerDescription:
        """Read the server's description, and keep it.

        Raises:
            ServerError: it can't be read.
        """
        try:
            model = read_models(await self._get("/v1/models"))
            if model.kind == "sglang":
                self.description = await self._describe_sglang(model)
            else:
                self.description = await self._describe_vllm(model)
        except (DescriptionGarbage, MetricsGarbage) as error:
            raise ServerGarbage(self.url, f"its description can't be read: {error}") from None
        return self.description

    async def load(self) -> ReportedLoad:
        """Read the server's load from its metrics.

        Raises:
            ServerError: it can't be read.
        """
        try:
            return read_load(await self._get("/metrics"))
        except MetricsGarbage as error:
            raise ServerGarbage(self.url, f"/metrics: {error}") from None

    async def healthy(self) -> bool:
        """Return whether the server answers, and says that it is well."""
        try:
            await self._get("/health")
        except ServerError:
            return False
        return True

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GeneratedTokens, None]:
        """Yield the tokens of an answer as they come.

        Raises:
            NotServable: before anything is sent.
            ServerError: at any time.
        """
        description = self._described()
        check_servable(description, call)
        self._check_refusal()
        n_top = call.sampling.logprobs
        reader: CompletionReader | SglangReader
        if description.kind == "sglang":
            path, body, reader = SGLANG_GENERATE, sglang_body(call), SglangReader(n_top)
        else:
            path, body, reader = COMPLETIONS, completions_body(call), CompletionReader(n_top)
        finished = False
        async with self._post(path, call.request_id, body) as response:
            try:
                async for data in self._events(response):
                    piece = reader.read(data)
                    if piece is None:
                        continue
                    if finished and piece.token_ids:
                        raise ServerGarbage(self.url, "tokens behind the last one")
                    finished = finished or bool(piece.finish)
                    yield piece
            except (ChunkGarbage, EventTooLong) as error:
                raise ServerGarbage(self.url, str(error)) from None
            except ChunkRefused as error:
                raise ServerRefused(self.url, error.status, str(error)) from None
            except ChunkAborted as error:
                raise AnswerBroken(self.url, f"gave the request up: {error}") from None
            except AnswerBroken:
                if not finished:
                    raise
            if not finished:
                raise AnswerBroken(self.url, "the answer ended without a finish_reason")

    async def pair_prefill(self, call: GenerateCall) -> PairPrefill:
        """Compute a prompt at this server, for the decode server of a pair.

        The server holds the blocks until the other one has read them, for 30 s at the most. It
        chooses the first token too; the decode server generates all tokens.

        Raises:
            NotServable: before anything is sent.
            ServerError: at any time.
        """
        check_servable(self._described(), call)
        self._check_refusal()
        async with self._post(COMPLETIONS, call.request_id, prefill_body(call)) as response:
            data = await self._body(response, self.limits.first_byte_timeout_s)
        try:
            return read_pair_prefill(data, call.sampling.logprobs)
        except ChunkGarbage as error:
            raise ServerGarbage(self.url, str(error)) from None
        except ChunkAborted as error:
            raise AnswerBroken(self.url, f"gave the request up: {error}") from None
        except ChunkRefused as error:
            raise ServerRefused(self.url, error.status, str(error)) from None

    async def release_pair_prefill(self, call: GenerateCall) -> None:
        """Let the prefill server of a pair free the blocks of a call that won't come here.

        Called at the decode server, with the `kv_transfer_params` of the call. Without it, the
        prefill server frees them 30 s after it has computed them.

        Raises:
            ServerError: the decode server did not take it.
        """
        try:
            async with self._post(COMPLETIONS, call.request_id, release_body(call)):
                raise ServerGarbage(self.url, "it streams a beam search, and released no blocks")
        except ServerRefused as error:
            if not error.invalid:
                raise

    async def _describe_vllm(self, model: ModelEntry) -> ServerDescription:
        block_size, n_blocks = read_cache_blocks(await self._get_if_there("/metrics"))
        version = await self._get_if_there("/version")
        sources = await self._get_if_there("/kv_event_sources")
        return self._description(
            model,
            version=read_version(version or b"{}"),
            block_size=block_size,
            n_blocks=n_blocks,
            event_endpoints=read_event_sources(sources or b"{}", self.url),
        )

    async def _describe_sglang(self, model: ModelEntry) -> ServerDescription:
        info = read_sglang_info(await self._get("/get_server_info"))
        n_tokens, size = info.max_total_num_tokens, info.page_size
        return self._description(
            model,
            version=info.version[:100],
            block_size=size,
            n_blocks=n_tokens // size if n_tokens and size and size > 0 else None,
            event_endpoints=sglang_event_endpoints(info, self.url),
        )

    def _description(self, model: ModelEntry, **fields: Any) -> ServerDescription:
        if model.max_model_len is None or model.max_model_len < 1:
            raise DescriptionGarbage("/v1/models has no max_model_len, as vLLM and SGLang have it")
        return ServerDescription(
            url=self.url,
            kind=model.kind,
            model=model.id,
            model_root=model.root or "",
            max_model_len=model.max_model_len,
            **fields,
        )

    def _described(self) -> ServerDescription:
        assert self.description is not None, "describe the server before it generates"
        return self.description

    def _check_refusal(self) -> None:
        """Raise the refusal of an earlier request, while its Retry-After runs."""
        left_s = self._refuses_until - asyncio.get_running_loop().time()
        if left_s > 0 and (refused := self._refused) is not None:
            raise ServerRefused(self.url, refused.status, refused.message, left_s)

    def _post(
        self, path: str, request_id: str, body: dict[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return self._request("POST", path, self.limits.first_byte_timeout_s, data, headers)

    async def _get(self, path: str) -> bytes:
        async with self._request("GET", path, self.limits.status_timeout_s) as response:
            return await self._body(response, self.limits.status_timeout_s)

    async def _get_if_there(self, path: str) -> bytes:
        """Return the answer; empty: the server does not have this path."""
        try:
            return await self._get(path)
        except ServerRefused as error:
            if error.status in (404, 405):
                return b""
            raise

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Open a request, and raise `ServerRefused` for an error status."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.request(
                    method, self.url + path, data=data, headers=headers, allow_redirects=False
                )
        except aiohttp.ConnectionTimeoutError:  # a `TimeoutError` too
            reason = f"no connection within {self.limits.connect_timeout_s:g} s"
            raise ServerGone(self.url, f"no answer to {path}: {reason}") from None
        except TimeoutError:
            raise ServerTooSlow(self.url, f"no answer to {path} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerGone(self.url, f"no answer to {path}: {_reason(error)}") from None
        try:
            if response.status != 200:
                raise await self._refusal(response)
            yield response
        finally:
            response.close()  # keeps the connection where the answer was read to its end

    async def _refusal(self, response: aiohttp.ClientResponse) -> ServerRefused:
        try:
            data = await self._read(response, _MAX_ERROR_BYTES, self.limits.status_timeout_s)
        except ServerError:
            data = b""
        wait_s = _retry_after_s(response.headers.get("Retry-After"))
        refused = ServerRefused(self.url, response.status, read_error(data), wait_s)
        if wait_s is not None and response.status in (429, 503):
            self._refused = refused
            self._refuses_until = asyncio.get_running_loop().time() + wait_s
        return refused

    async def _body(self, response: aiohttp.ClientResponse, timeout_s: float) -> bytes:
        return await self._read(response, self.limits.max_body_bytes, timeout_s)

    async def _read(
        self, response: aiohttp.ClientResponse, max_bytes: int, timeout_s: float
    ) -> bytes:
        """Read a whole answer of at most `max_bytes` within `timeout_s`."""
        parts: list[bytes] = []
        n_bytes = 0
        try:
            async with asyncio.timeout(timeout_s):
                while part := await response.content.readany():
                    n_bytes += len(part)
                    if n_bytes > max_bytes:
                        raise ServerGarbage(self.url, f"an answer of over {max_bytes} bytes")
                    parts.append(part)
        except TimeoutError:
            raise ServerTooSlow(self.url, f"no whole answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerBroken(self.url, f"the answer broke off: {_reason(error)}") from None
        return b"".join(parts)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """Yield the data of the events of an answer, up to the last one."""
        stream = EventLines(self.limits.max_event_bytes)
        timeout_s = self.limits.first_byte_timeout_s
        done = False
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    part = await response.content.readany()
            except TimeoutError:
                raise ServerTooSlow(self.url, f"no byte within {timeout_s:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise AnswerBroken(self.url, f"the answer broke off: {_reason(error)}") from None
            if not part:
                return
            timeout_s = self.limits.idle_timeout_s
            for data in stream.feed(part):
                done = done or data == DONE
                if not done:
                    yield data


def _retry_after_s(text: str | None) -> float | None:
    """Read the header Retry-After: seconds, or a date."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = parsedate_to_datetime(text)
            seconds = date.timestamp() - time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else None


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
