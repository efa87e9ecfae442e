"""The bench's own HTTP: connections that are kept, and endpoints that misbehave on them."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from halfmoon_cli.bench.load.bench_record import BenchRecord
from halfmoon_cli.bench.load.http_client import BenchHttpClient
from halfmoon_cli.bench.load.request_sender import RequestSender
from halfmoon_cli.endpoint.endpoint_address import parse_endpoint
from halfmoon_cli.endpoint.endpoint_errors import EndpointUnreachable, StreamBroken
from halfmoon_testing.scripted_endpoint import ScriptedAnswer, ScriptedEndpoint

BODY = json.dumps({"model": "scripted", "prompt": [1, 2]}).encode()


@contextmanager
def server(*answers: bytes) -> Iterator[tuple[str, list[int]]]:
    """Answers with these bytes and closes: one connection each. Its URL; requests so far."""
    listener = socket.create_server(("127.0.0.1", 0))
    n_asked = [0]

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" in connection.recv(1 << 16) and answer:
                    n_asked[0] += 1
                    connection.sendall(answer)
                    if b"keep" not in answer:
                        break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", n_asked
    listener.close()


async def test_connections_are_kept_for_the_next_request(endpoint: ScriptedEndpoint) -> None:
    async with BenchHttpClient(parse_endpoint(endpoint.url)) as wire:
        url = f"{endpoint.url}/v1/completions"
        for _ in range(5):
            pieces: list[bytes] = []
            answer = await wire.post(url, BODY, pieces.append)
            assert answer.status == 200 and b"".join(pieces).endswith(b"data: [DONE]\n\n")
        assert len(wire._all) == 1
        await asyncio.gather(*(wire.post(url, BODY, lambda _: None) for _ in range(8)))
        assert len(wire._all) == 8


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx: keep\r\n\r\nok"
    listener = socket.create_server(("127.0.0.1", 0))
    closed = threading.Event()

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)
                # It takes one more request, and leaves it without an answer.
                connection.recv(1 << 16)
            closed.set()

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with BenchHttpClient(parse_endpoint(url)) as wire:
        assert (await wire.get(url + "/v1/a")).body == b"ok"
        assert (await wire.get(url + "/v1/b")).body == b"ok"
    assert closed.is_set()
    listener.close()


async def test_a_new_connection_without_an_answer_is_told_and_not_tried_again() -> None:
    with server(b"") as (url, _):
        async with BenchHttpClient(parse_endpoint(url)) as wire:
            with pytest.raises(EndpointUnreachable, match="without an answer"):
                await wire.get(f"{url}/v1/models")


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    with server(b"HTTP/1.0 200 OK\r\n\r\nto the end") as (url, _):
        async with BenchHttpClient(parse_endpoint(url)) as wire:
            assert (await wire.get(f"{url}/v1/models")).body == b"to the end"
            assert not wire._idle


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_no_answer(said: bytes) -> None:
    with server(said) as (url, _):
        async with BenchHttpClient(parse_endpoint(url)) as wire:
            with pytest.raises(StreamBroken):
                await wire.get(f"{url}/v1/models")


async def test_nobody_there_is_unreachable() -> None:
    async with BenchHttpClient(parse_endpoint("http://127.0.0.1:9")) as wire:
        with pytest.raises(EndpointUnreachable, match="no connection"):
            await wire.get("http://127.0.0.1:9/v1/models")


async def test_a_request_that_is_given_up_closes_its_connection(
    endpoint: ScriptedEndpoint,
) -> None:
    endpoint.scripts = [ScriptedAnswer(hold_after=1)]
    async with BenchHttpClient(parse_endpoint(endpoint.url)) as wire:
        begun = asyncio.Event()
        url = f"{endpoint.url}/v1/completions"
        asking = asyncio.create_task(wire.post(url, BODY, lambda _: begun.set()))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await asyncio.to_thread(endpoint.client_gone.wait, 60)


# What one request becomes


async def asked(
    endpoint: ScriptedEndpoint, script: ScriptedAnswer, *, limit_s: float = 60.0
) -> BenchRecord:
    endpoint.scripts = [script]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    clock: Callable[[], float] = lambda: loop.time() - began_s  # noqa: E731
    async with BenchHttpClient(parse_endpoint(endpoint.url, endpoint.key)) as wire:
        record = BenchRecord(0, 0.0, 10, 3)
        asker = RequestSender(wire, f"{endpoint.url}/v1/completions", clock, limit_s=limit_s)
        await asker.ask(BODY, record)
    return record


async def test_a_finished_request_has_its_usage_and_its_moments(
    endpoint: ScriptedEndpoint,
) -> None:
    record = await asked(endpoint, ScriptedAnswer(n_prompt=50, n_cached=32))
    assert (record.outcome, record.status) == ("finished", 200)
    assert (record.n_prompt, record.n_cached, record.n_out) == (50, 32, 3)
    assert len(record.gaps_s) == 2
    moments = (record.sent_s, record.first_s, record.last_s, record.ended_s)
    assert sorted(moments, key=lambda each: each or 0.0) == list(moments)


@pytest.mark.parametrize(
    ("script", "outcome", "reason"),
    [
        (
            ScriptedAnswer(status=429, body={"error": {"code": "overloaded"}}),
            "refused",
            "429 overloaded",
        ),
        (ScriptedAnswer(status=500, body="<h1>oh</h1>"), "refused", "500 <h1>oh</h1>"),
        (ScriptedAnswer(cut_after=2), "failed", "cut off"),
        (ScriptedAnswer(end_after=2), "failed", "without a reason"),
        (ScriptedAnswer(error="worker died"), "failed", "given up: worker died"),
        (ScriptedAnswer(pieces=()), "failed", "no token came"),
    ],
)
async def test_what_is_no_whole_answer_is_refused_or_failed_and_says_why(
    endpoint: ScriptedEndpoint, script: ScriptedAnswer, outcome: str, reason: str
) -> None:
    record = await asked(endpoint, script)
    assert record.outcome == outcome
    assert reason in record.reason


async def test_a_request_that_takes_too_long_has_failed_and_is_closed(
    endpoint: ScriptedEndpoint,
) -> None:
    record = await asked(endpoint, ScriptedAnswer(hold_after=1), limit_s=0.3)
    assert (record.outcome, record.reason) == ("failed", "not over within 0.3 s")
    assert await asyncio.to_thread(endpoint.client_gone.wait, 60)


async def test_the_key_is_sent(endpoint: ScriptedEndpoint) -> None:
    endpoint.key = "secret"
    assert (await asked(endpoint, ScriptedAnswer())).outcome == "finished"
    assert msgspec.json.decode(BODY) == endpoint.asked[0][1]
