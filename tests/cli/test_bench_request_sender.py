"""Requests of the bench: connections that are kept, and endpoints that misbehave on them."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from halfmoon_cli.bench.bench_record import BenchRecord
from halfmoon_cli.bench.request_sender import RequestSender
from halfmoon_cli.endpoint.endpoint_address import parse_endpoint
from halfmoon_testing.scripted_endpoint import ScriptedAnswer, ScriptedEndpoint

BODY = json.dumps({"model": "scripted", "prompt": [1, 2]}).encode()
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"one","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(EVENTS), EVENTS)


@contextmanager
def server(*connections: tuple[bytes, ...]) -> Iterator[tuple[str, list[int]]]:
    """A server that answers each connection's requests with these bytes, then closes it.

    Empty bytes: the request is read and the connection closed. Gives the URL, and the requests
    of each connection so far.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    n_asked = [0] * len(connections)

    def serve() -> None:
        for number, answers in enumerate(connections):
            connection, _ = listener.accept()
            with connection:
                for answer in answers:
                    data = b""
                    while not data.endswith(BODY):
                        data += connection.recv(1 << 16)
                    n_asked[number] += 1
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", n_asked
    listener.close()


def clock() -> Callable[[], float]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    return lambda: loop.time() - began_s


async def sent(
    url: str, n_requests: int = 1, *, key: str = "", limit_s: float = 60.0
) -> list[BenchRecord]:
    """Records of requests, one after another."""
    records = [BenchRecord(i, 0.0, 10, 3) for i in range(n_requests)]
    async with RequestSender(parse_endpoint(url, key), clock(), limit_s=limit_s) as sender:
        for record in records:
            await sender.send(BODY, record)
    return records


async def sent_once(
    endpoint: ScriptedEndpoint, script: ScriptedAnswer, *, limit_s: float = 60.0
) -> BenchRecord:
    endpoint.scripts = [script]
    (record,) = await sent(endpoint.url, key=endpoint.key, limit_s=limit_s)
    return record


# Connections


async def test_connections_are_kept_for_the_next_request() -> None:
    with server((WHOLE,) * 5) as (url, n_asked):
        records = await sent(url, 5)
    assert [record.outcome for record in records] == ["finished"] * 5
    assert n_asked == [5]


async def test_as_many_connections_are_opened_as_requests_are_under_way(
    endpoint: ScriptedEndpoint,
) -> None:
    endpoint.scripts = [ScriptedAnswer(hold_after=1)]
    async with RequestSender(parse_endpoint(endpoint.url), clock(), limit_s=60.0) as sender:
        records = [BenchRecord(i, 0.0, 10, 3) for i in range(150)]
        tasks = [asyncio.create_task(sender.send(BODY, record)) for record in records]
        while any(record.first_s is None for record in records):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await asyncio.to_thread(endpoint.client_gone.wait, 60)


async def test_a_kept_connection_that_is_closed_without_an_answer_is_replaced() -> None:
    with server((WHOLE, b""), (WHOLE,)) as (url, n_asked):
        records = await sent(url, 2)
    assert [record.outcome for record in records] == ["finished"] * 2
    assert n_asked == [2, 1]


async def test_a_new_connection_without_an_answer_is_a_failure_and_not_tried_again() -> None:
    with server((b"",), (WHOLE,)) as (url, n_asked):
        (record,) = await sent(url)
    assert (record.outcome, record.status) == ("failed", 0)
    assert "without an answer" in record.reason
    assert n_asked == [1, 0]


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    with server((b"HTTP/1.0 200 OK\r\n\r\n" + EVENTS,)) as (url, _):
        (record,) = await sent(url)
    assert (record.outcome, record.n_out) == ("finished", 1)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_a_failure(said: bytes) -> None:
    with server((said,)) as (url, _):
        (record,) = await sent(url)
    assert record.outcome == "failed"
    assert "cut off" in record.reason


async def test_an_address_without_a_server_is_a_failure() -> None:
    (record,) = await sent("http://127.0.0.1:9")
    assert record.outcome == "failed" and "no connection" in record.reason


# Outcomes


async def test_a_finished_request_has_its_usage_and_its_moments(
    endpoint: ScriptedEndpoint,
) -> None:
    record = await sent_once(endpoint, ScriptedAnswer(n_prompt=50, n_cached=32))
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
async def test_a_request_without_a_whole_answer_is_refused_or_failed_with_the_reason(
    endpoint: ScriptedEndpoint, script: ScriptedAnswer, outcome: str, reason: str
) -> None:
    record = await sent_once(endpoint, script)
    assert record.outcome == outcome
    assert reason in record.reason


async def test_a_request_that_takes_too_long_has_failed_and_is_closed(
    endpoint: ScriptedEndpoint,
) -> None:
    record = await sent_once(endpoint, ScriptedAnswer(hold_after=1), limit_s=0.3)
    assert (record.outcome, record.reason) == ("failed", "not over within 0.3 s")
    assert await asyncio.to_thread(endpoint.client_gone.wait, 60)
