"""Every hostile request that is known, sent in turn to a live cluster while a victim asks on.

The victim's latencies are printed, with the process that each hostile act is aimed at; what is
asserted is that no process ends and that the victim gets its exact tokens each time.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import LiveCluster, StartCluster
from tests.nightly import by_day

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

#: Seconds between two requests of the victim.
PAUSE_S = 0.3
PROMPT = [5 + i % 300 for i in range(100)]
SPINNING = {"type": "integer", "multipleOf": 2**31}
Act = Callable[[Any], Any]


class Victim:
    """Asks the same again and again, and remembers what it got, when, and how fast."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)
        self.expected = self._ask()
        #: Name of what is done to the cluster now.
        self.act = ""
        self.waits: list[tuple[float, str]] = []
        self.failures: list[tuple[str, str]] = []

    def __enter__(self) -> "Victim":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._over.wait(PAUSE_S):
            act, began_s = self.act, time.monotonic()
            try:
                got = self._ask()
            except Exception as error:
                self.failures.append((act, repr(error)))
                continue
            self.waits.append((time.monotonic() - began_s, act))
            if got != self.expected:
                self.failures.append((act, f"got {got!r}"))

    def _ask(self) -> list[int]:
        return self._cluster.ask(PROMPT, 8)[0]


# -- over HTTP ---------------------------------------------------------------------------------


def chat(**fields: Any) -> Act:
    def act(cluster: Any) -> int:
        body = {"model": cluster.model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return post(cluster, "/v1/chat/completions", json.dumps(body).encode())

    return act


def raw(path: str, body: bytes) -> Act:
    return lambda cluster: post(cluster, path, body)


def post(cluster: Any, path: str, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{cluster.url}{path}", content=body, headers=headers, timeout=120)
    assert answer.status_code != 500, answer.text[:300]
    assert len(answer.content) < 20_000, "an error that is as long as the request"
    return answer.status_code


def at_once(*acts: Act) -> Act:
    def act(cluster: Any) -> list[Any]:
        with ThreadPoolExecutor(len(acts)) as clients:
            return list(clients.map(lambda each: each(cluster), acts))

    return act


def left(act: Act) -> Act:
    """The same by clients that hang up after a moment."""

    def acts(cluster: Any) -> None:
        transport = httpx.HTTPTransport()
        for _ in range(5):
            body = json.dumps(
                {"model": cluster.model, "prompt": "\n" * 2_000_000, "guided_json": SPINNING}
            ).encode()
            with pytest.raises(httpx.TimeoutException), httpx.Client(transport=transport) as client:
                client.post(
                    f"{cluster.url}/v1/completions",
                    content=body,
                    headers={"content-type": "application/json"},
                    timeout=0.05,
                )
                raise httpx.ReadTimeout("it was quicker")

    return acts


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


def chained(n: int, depth: int) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        below: dict[str, Any] = {"$ref": f"#/$defs/d{i + 1}"}
        for _ in range(depth):
            below = {"items": below}
        return below

    return {"$defs": {**{f"d{i}": link(i) for i in range(n)}, f"d{n}": {}}, "$ref": "#/$defs/d0"}


def tool(**fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": SPINNING}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def connected(cluster: Any) -> socket.socket:
    parts = urlsplit(cluster.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def headers(*lines: bytes) -> Act:
    """A head that never ends; the answer, or None where the connection was closed before."""

    def act(cluster: Any) -> int | None:
        with connected(cluster) as client:
            try:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
                for line in lines:
                    client.sendall(line)
                status = client.recv(4096).split()[1]
            except OSError:
                return None
        assert status == b"431"
        return 431

    return act


def half_sent(n: int, declared: int) -> Act:
    """Bodies that are announced and never sent to their end."""

    def act(cluster: Any) -> None:
        clients = [connected(cluster) for _ in range(n)]
        for client in clients:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n{" % declared
            )
        held.extend(clients)

    return act


def left_behind(n: int) -> Act:
    """Streams with keys that go on without their clients."""

    def leave(cluster: Any, number: int) -> int:
        body = {"prompt": PROMPT, "max_tokens": 800, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST",
            f"{cluster.url}/v1/completions",
            json={"model": cluster.model, **body},
            headers={"idempotency-key": f"left-{number}"},
            timeout=60,
        ) as answer:
            assert answer.status_code in (200, 429)
            next(answer.iter_raw())
        return answer.status_code

    return at_once(*(partial(leave, number=number) for number in range(n)))


#: Connections that stay open to the end.
held: list[socket.socket] = []

EMPTY = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
OVER_HTTP: dict[str, Act] = {
    "a schema that spins": chat(response_format=schema(SPINNING)),
    "four others at once": at_once(
        *(chat(response_format=schema({**SPINNING, "multipleOf": 2**31 + i})) for i in range(1, 5))
    ),
    "the same as a tool": chat(tools=[tool(strict=True)], tool_choice="required"),
    "the same as a tool, at will": chat(tools=[tool(strict=True)]),
    "another one that spins": chat(
        response_format=schema({"type": "number", "multipleOf": 123456789.25})
    ),
    "chained references": chat(response_format=schema(chained(110, 15))),
    "cyclic references": chat(response_format=schema({"$ref": "#", "items": {"$ref": "#"}})),
    "a* for ever": chat(guided_regex="a*" * by_day(8_000, at_night=30_000)),
    "a long count": chat(guided_regex="((a{1000}){1000}){1000}"),
    "a grammar that recurses": chat(guided_grammar="start: start start | start | "),
    "a grammar of nothing": chat(guided_grammar='start: ("" | "")*'),
    "clients that leave at once": left(chat()),
    "180,000 empty messages": chat(messages=[EMPTY] * 180_000),
    "100,000 parts": chat(messages=[{"role": "user", "content": [PART] * 100_000}]),
    "100,000 items": raw(
        "/v1/responses", json.dumps({"model": "m", "input": [EMPTY] * 100_000}).encode()
    ),
    "100,000 tools": chat(tools=[tool()] * 30_000),
    "100,000 stop strings": chat(stop=["a"] * 100_000),
    "8 MiB of newlines": chat(messages=[{"role": "user", "content": "\n" * 4_000_000}]),
    "8 MiB of one word": chat(messages=[{"role": "user", "content": "a" * 8_000_000}]),
    "8 MiB of spaces to tokenize": raw(
        "/tokenize", json.dumps({"prompt": " " * 8_000_000}).encode()
    ),
    "arrays within arrays": raw("/v1/completions", b'{"prompt":' + b"[" * 4_000_000),
    "objects within objects": raw("/v1/chat/completions", b'{"a":' * 1_000_000),
    "a million empty objects": raw(
        "/v1/chat/completions", b'{"messages":[' + b"{}," * 1_000_000 + b"{}]}"
    ),
    "a million wrong fields": raw(
        "/v1/completions",
        b"{" + b",".join(b'"f%d":1' % i for i in range(500_000)) + b"}",
    ),
    "two million token ids": raw(
        "/v1/completions", b'{"prompt":[' + b"1," * 2_000_000 + b'1],"max_tokens":1}'
    ),
    "a number of a million digits": raw(
        "/v1/completions", b'{"prompt":"a","seed":' + b"9" * 1_000_000 + b"}"
    ),
    "a template variable that is deep": chat(
        chat_template_kwargs={"a": json.loads("[" * 200 + "]" * 200)}
    ),
    "50 MB of one header": headers(b"x-large: ", *[b"a" * 1_000_000] * 50),
    "200,000 headers": headers(*[b"x-a: b\r\n" * 1000] * 200),
    "streams with keys, left behind": left_behind(by_day(15, at_night=100)),
    "half-sent bodies": half_sent(300, 1000),
    "half-sent large bodies": half_sent(300, 8_000_000),
}


def test_no_hostile_request_ends_a_process_or_fails_a_victim(
    start_cluster: StartCluster, tiny_model: Path
) -> None:
    with (
        start_cluster(str(tiny_model), n_prefill=2, n_decode=2) as cluster,
        Victim(cluster) as victim,
    ):
        live = cluster.live()
        for name, act in OVER_HTTP.items():
            victim.act, n_before = name, len(victim.waits)
            began_s = time.monotonic()
            said = act(cluster)
            took_s = time.monotonic() - began_s
            cluster.until(lambda n=n_before: len(victim.waits) + len(victim.failures) >= n + 2)
            slowest = max((wait for wait, _ in victim.waits[n_before:]), default=float("nan"))
            print(f"{name:40} {str(said)[:24]:24} {took_s:6.2f} s, victim {slowest * 1e3:6.0f} ms")
            assert not cluster.cluster.dead(), (name, cluster.logs())
            assert not victim.failures, (victim.failures, cluster.logs())
        victim.act = "nothing"
        cluster.until(lambda: cluster.live() == live)
        for client in held:
            client.close()
    assert victim.expected
    slowest_s, act_then = max(victim.waits)
    print(f"{len(victim.waits)} requests of the victim; slowest {slowest_s:.2f} s at {act_then!r}")
