"""Request one answer, read its stream, and keep its times and counts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from halfmoon_cli.endpoint.endpoint_address import ApiEndpoint
from halfmoon_cli.endpoint.endpoint_errors import (
    StreamBroken,
    connection_error,
    refusal_error,
    stream_error,
)
from halfmoon_cli.endpoint.sse_events import SseReader
from halfmoon_cli.endpoint.stream_chunks import DONE, StreamChunk, StreamUsage, read_chunk


@dataclass
class StreamedAnswer:
    """The part of an answer that has arrived. Times are seconds since the request was sent."""

    text: str = ""
    finish_reason: str = ""
    usage: StreamUsage | None = None
    #: Events that brought text.
    n_pieces: int = 0
    first_s: float | None = None
    last_s: float = 0.0

    @property
    def n_out(self) -> int:
        """Tokens by the endpoint's count; without one, events with text."""
        return self.usage.n_out if self.usage is not None else self.n_pieces

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token; None for a single one."""
        if self.first_s is None or self.n_out < 2 or self.last_s <= self.first_s:
            return None
        return (self.n_out - 1) / (self.last_s - self.first_s)

    def take(self, chunk: StreamChunk, at_s: float) -> None:
        """Add the content of an event."""
        if chunk.has_tokens:
            self.first_s = at_s if self.first_s is None else self.first_s
            self.last_s = at_s
            self.n_pieces += 1
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage


def format_answer_stats(answer: StreamedAnswer) -> str:
    """Return times and token counts of an answer, on one line."""
    parts: list[str] = []
    if answer.first_s is not None:
        parts.append(f"TTFT {_time(answer.first_s)}")
    if answer.tokens_per_s is not None:
        parts.append(f"{answer.tokens_per_s:,.1f} tokens/s")
    parts.append(f"{answer.n_out:,} tokens" if answer.n_out != 1 else "1 token")
    if (usage := answer.usage) is not None:
        if usage.n_cached is None:
            parts.append(f"{usage.prompt_tokens:,} prompt tokens")
        else:
            parts.append(f"{usage.n_cached:,} of {usage.prompt_tokens:,} prompt tokens cached")
    if answer.finish_reason not in ("", "stop"):
        parts.append(
            {"length": "cut at max_tokens"}.get(answer.finish_reason, answer.finish_reason)
        )
    return " · ".join(parts)


def stream_answer(
    client: httpx.Client,
    endpoint: ApiEndpoint,
    body: dict[str, Any],
    answer: StreamedAnswer,
    show: Callable[[StreamChunk], None],
) -> None:
    """Send a request and read its answer to the end; any end closes the connection.

    Args:
        client: has the endpoint's headers.
        endpoint: receives the request.
        body: of /chat/completions, streamed.
        answer: filled with each event, so that a part remains when this raises.
        show: called with each event.

    Raises:
        EndpointError: it was refused, or broke off.
    """
    url = f"{endpoint.api}/chat/completions"
    began_s = time.perf_counter()
    reader = SseReader()
    begun = False
    try:
        with client.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                raise refusal_error(response.status_code, response.headers, response.read())
            begun = True
            for piece in response.iter_bytes():
                at_s = time.perf_counter() - began_s
                for data in reader.feed(piece):
                    if data == DONE:
                        return
                    chunk = read_chunk(data)
                    answer.take(chunk, at_s)
                    show(chunk)
    except httpx.HTTPError as error:
        raise (stream_error(error) if begun else connection_error(endpoint.api, error)) from error
    if not answer.finish_reason:
        raise StreamBroken("the answer was cut off: its stream ended without a reason; try again")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
