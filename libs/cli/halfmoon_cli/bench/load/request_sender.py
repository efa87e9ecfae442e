"""One request of a load: sent, its answer read as it comes, and written into its record."""

import asyncio
from collections.abc import Callable

from halfmoon_cli.bench.load.bench_record import BenchRecord
from halfmoon_cli.bench.load.http_client import BenchHttpClient
from halfmoon_cli.endpoint.endpoint_errors import EndpointError, refusal_error
from halfmoon_cli.endpoint.sse_events import SseReader
from halfmoon_cli.endpoint.stream_chunks import DONE, StreamUsage, read_chunk


class RequestSender:
    """Asks one endpoint.

    Args:
        wire: the way there.
        url: of completions or chat completions.
        clock: seconds since the start of the run.
        limit_s: a request that takes longer has failed.
    """

    def __init__(
        self, wire: BenchHttpClient, url: str, clock: Callable[[], float], *, limit_s: float
    ) -> None:
        self._wire = wire
        self._url = url
        self._clock = clock
        self._limit_s = limit_s

    async def ask(self, body: bytes, record: BenchRecord) -> None:
        """Send this, and keep what becomes of it. Nothing of the endpoint's is raised."""
        events = SseReader()
        finish = ""
        usage: StreamUsage | None = None

        def take(piece: bytes) -> None:
            nonlocal finish, usage
            at_s = self._clock()
            for data in events.feed(piece):
                if data == DONE:
                    continue
                chunk = read_chunk(data)
                if chunk.has_tokens:
                    record.token(at_s)
                finish = chunk.finish_reason or finish
                usage = chunk.usage or usage

        record.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._limit_s):
                answer = await self._wire.post(self._url, body, take)
        except TimeoutError:
            record.end(self._clock(), "failed", f"not over within {self._limit_s:g} s")
            return
        except EndpointError as error:
            record.end(self._clock(), "failed", str(error))
            return
        ended_s = self._clock()
        record.status = answer.status
        if answer.status != 200:
            told = refusal_error(answer.status, answer.headers, answer.body)
            record.end(ended_s, "refused", f"{answer.status} {told.code or told.reason}")
            return
        if usage is not None:
            record.n_prompt, record.n_cached = usage.prompt_tokens, usage.n_cached
            record.n_out = usage.n_out or record.n_out
        if not finish:
            record.end(ended_s, "failed", "the stream ended without a reason")
        elif record.first_s is None:
            record.end(ended_s, "failed", "no token came")
        else:
            record.end(ended_s, "finished")
