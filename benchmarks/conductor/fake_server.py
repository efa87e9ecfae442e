"""Serve completions at next to no cost, behind the routers that are measured.

It streams as many chunks as `max_tokens` says: the first at once, then one per step, to all
requests at the same beat. It reads HTTP with httptools and looks at nothing but `max_tokens`. It
describes itself as a vLLM without KV events, for `halfmoon route`.

    python -m benchmarks.conductor.fake_server PORT STEP_S
"""

import asyncio
import re
import sys
from typing import cast

import httptools
import uvloop

from benchmarks.conductor.ticking import tick_forever

_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_MODELS = (
    b'{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm",'
    b'"max_model_len":1000000}]}'
)
_METRICS = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000000"} 1\n'
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
)
#: What is asked of it beside completions.
_PAGES = {"/metrics": _METRICS, "/version": b'{"version":"bench"}', "/kv_event_sources": b"{}"}
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(finish: str) -> bytes:
    return _chunked(
        b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
        b'"created":1700000000,"model":"bench","choices":[{"index":0,"text":" word",'
        b'"logprobs":null,"token_ids":[123],"finish_reason":' + finish.encode() + b"}]}\n\n"
    )


_MORE, _LAST = _event("null"), _event('"length"')
_DONE = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client, which sends one request at a time."""

    #: Those with tokens to come.
    streaming: "set[Connection]" = set()  # noqa: RUF012

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._url = b""
        self._n_left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """And gone."""
        self.streaming.discard(self)

    def data_received(self, data: bytes) -> None:
        """Part of a request."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """The path of a request."""
        self._url = url

    def on_body(self, body: bytes) -> None:
        """Part of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        """A whole request."""
        asked, self._body = _MAX_TOKENS.search(self._body), b""
        if asked is None:
            page = _PAGES.get(self._url.decode(), _MODELS)
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n"
            json = b"content-type: application/json\r\n\r\n"
            self._transport.write(head.encode() + json + page)
            return
        self._n_left = int(asked[1])
        self._transport.write(_HEAD + self._next())
        if self._n_left:
            self.streaming.add(self)

    def step(self) -> None:
        """One token more."""
        self._transport.write(self._next())
        if not self._n_left:
            self.streaming.discard(self)

    def _next(self) -> bytes:
        self._n_left -= 1
        return _MORE if self._n_left else _LAST + _DONE


async def _step() -> None:
    for connection in [*Connection.streaming]:
        connection.step()


async def main(port: int, step_s: float) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    async with server:
        await tick_forever(step_s, _step)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), float(sys.argv[2])))
