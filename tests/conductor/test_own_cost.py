"""What a request and a token may cost the conductor, in things that can be counted."""

import asyncio
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from halfmoon_conductor.api.sse import to_json_line
from halfmoon_conductor.routes.generation_route import MAX_INLINE_BYTES
from halfmoon_testing.conductor_http import ScriptedGateway
from tests.conductor.fronts import COMPLETIONS, Front

COMPLETION: dict[str, Any] = {"model": "lab/moon", "max_tokens": 2, "temperature": 0}
#: Of any Python function, the loop and the scripted gateway included.
MAX_CALLS_PER_TOKEN = 60
MAX_CALLS_PER_KEYED_TOKEN = 110
MAX_CALLS_PER_REQUEST = 320


class CountingThreads(ThreadPoolExecutor):
    n_tasks = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.n_tasks += 1
        return super().submit(*args, **kwargs)


@pytest.mark.parametrize(
    ("prompt", "n_threads"),
    [("How half is it?", 1), ([5, 6, 7], 0), ([5] * MAX_INLINE_BYTES, 1)],
    ids=["text", "ids", "many ids"],
)
async def test_only_a_few_token_ids_are_read_on_the_event_loop(
    front: Front, prompt: object, n_threads: int
) -> None:
    threads = CountingThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    await front.post(COMPLETIONS, COMPLETION, prompt=prompt)
    assert threads.n_tasks == n_threads


@pytest.mark.parametrize(
    ("keys", "most"),
    [((b"", b""), MAX_CALLS_PER_TOKEN), ((b"a", b"b"), MAX_CALLS_PER_KEYED_TOKEN)],
    ids=["plain", "that a client may come back to"],
)
async def test_a_streamed_token_takes_few_calls(
    app: FastAPI, gateway: ScriptedGateway, keys: tuple[bytes, bytes], most: int
) -> None:
    gateway.script = gateway.script[:1]
    few, many = [await _calls(app, n, key=key) for n, key in zip((20, 120), keys, strict=True)]
    assert 1 < (many - few) / 100 <= most


async def test_a_request_takes_few_calls_however_its_type_is_written(
    app: FastAPI, gateway: ScriptedGateway
) -> None:
    gateway.script = gateway.script[:1]
    await _calls(app, 1)  # what is done once
    for content_type in (b"application/json", b"application/json; charset=utf-8"):
        assert await _calls(app, 1, content_type) < MAX_CALLS_PER_REQUEST


async def _calls(
    app: FastAPI, n_new: int, content_type: bytes = b"application/json", key: bytes = b""
) -> int:
    """Python functions called for a stream of so many tokens."""
    body = to_json_line(COMPLETION | {"prompt": [5], "max_tokens": n_new, "stream": True}).encode()
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[bytes] = []

    async def receive() -> Message:
        return received.pop() if received else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "server": None,
        "headers": [(b"content-type", content_type), *([(b"idempotency-key", key)] if key else [])],
    }
    n_calls = 0

    def count(frame: object, kind: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += kind == "call"

    sys.setprofile(count)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
    assert b"".join(sent).count(b'"text"') == n_new
    return n_calls
