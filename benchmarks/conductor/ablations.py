"""`python -m benchmarks.conductor.ablations`: what parts of a conductor's request path save.

The CPU time of a request inside one process, with and without a part: the word cache, and the
route class that replaces FastAPI's handling of arguments. Requests with and without it
alternate, so that the machine's load hits both. A scripted gateway makes the tokens, so no worker
takes part. The prompts are those of `benchmarks.conductor`.

Prints medians over rounds, and the ratio without the part to with it.
"""

import asyncio
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.types import Message

from benchmarks.conductor.prompts import Prompts
from halfmoon_conductor.engine_io.gateway_interface import ModelCard
from halfmoon_conductor.http_server import request_context
from halfmoon_conductor.http_server.request_context import RequestContext, request_context_of
from halfmoon_conductor.inputs.preparation_messages import ReadBody, keep_read_body
from halfmoon_conductor.routes import rest_app
from halfmoon_conductor.text.hub_tokenizer import HubTokenizer
from halfmoon_conductor.text.word_cache import WordCache
from halfmoon_testing.conductor_http import ScriptedGateway

N_ROUNDS, N_REQUESTS, N_PROMPTS = 21, 50, 200


class PlainRoute(APIRoute):
    """Handle arguments and bodies as FastAPI does by itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's own handler."""
        handle = super().get_route_handler()

        async def timed(request: Request) -> Response:
            keep_read_body(request.scope, ReadBody(time.perf_counter()))
            return await handle(request)

        return timed


async def _context(request: Request) -> RequestContext:
    return request_context_of(request.headers, request.scope)


def make_app(folder: Path, *, word_cache: bool = True, generation_route: bool = True) -> FastAPI:
    """Build an app, with or without a part."""
    if word_cache:
        tokenizer = HubTokenizer(folder)
    else:
        with patch.object(WordCache, "open", lambda *_: None):
            tokenizer = HubTokenizer(folder)
    card = ModelCard(name="bench", max_context=8192, created=0)
    gateway, registry = ScriptedGateway([300], model=card), CollectorRegistry()
    if generation_route:
        return rest_app.create_app(gateway, tokenizer, registry=registry)
    with patch.object(rest_app, "generation_route", lambda *_: PlainRoute):
        app = rest_app.create_app(gateway, tokenizer, registry=registry)
    app.dependency_overrides[request_context._declared_headers] = _context
    return app


async def cpu_s(app: FastAPI, prompts: Sequence[msgspec.Raw]) -> float:
    """Return the mean CPU seconds of a request for one token."""
    began_s = time.process_time()
    for prompt in prompts:
        body = b'{"model": "bench", "max_tokens": 1, "prompt": ' + bytes(prompt) + b"}"
        await _post(app, body)
    return (time.process_time() - began_s) / len(prompts)


async def _post(app: FastAPI, body: bytes) -> None:
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0

    async def receive() -> Message:
        return received.pop() if received else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    if status != 200:
        raise RuntimeError(f"status {status}")


async def compare(name: str, apps: Sequence[FastAPI], prompts: Sequence[msgspec.Raw]) -> None:
    """Print the cost of a request with a part (the first app) and without it."""
    spent_s: list[list[float]] = [[], []]
    for app in apps:
        await cpu_s(app, prompts)  # fill caches
    for number in range(N_ROUNDS):
        some = [prompts[(number * N_REQUESTS + i) % len(prompts)] for i in range(N_REQUESTS)]
        for app, row in zip(apps, spent_s, strict=True):
            row.append(await cpu_s(app, some))
    with_s, without_s = map(statistics.median, spent_s)
    print(
        f"{name}: {with_s * 1e6:.0f} µs with, {without_s * 1e6:.0f} µs without, "
        f"ratio {without_s / with_s:.2f}"
    )


async def main() -> None:
    """Measure both parts."""
    quiet = structlog.make_filtering_bound_logger(logging.INFO)
    structlog.configure(wrapper_class=quiet)  # a conductor's log level
    with tempfile.TemporaryDirectory() as parent:
        prompts = Prompts.make(Path(parent) / "tokenizer", random.Random(1), N_PROMPTS)
        whole = make_app(prompts.tokenizer)
        plain = make_app(prompts.tokenizer, generation_route=False)
        uncached = make_app(prompts.tokenizer, word_cache=False)
        await compare("word cache, 512 tokens of text", [whole, uncached], prompts.texts)
        await compare("generation route, 512 token ids", [whole, plain], prompts.ids)
        await compare("generation route, 3 words", [whole, plain], [prompts.short_text])


if __name__ == "__main__":
    asyncio.run(main())
