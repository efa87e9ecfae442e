"""A service's HTTP for operators: what anybody may ask, and what a service adds."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from halfmoon_runtime.allowed_hosts import AllowedHosts
from halfmoon_runtime.observability.operator_http import (
    OperatorHttp,
    OperatorHttpError,
    OperatorRequest,
    decode_body,
)
from halfmoon_runtime.observability.operator_tokens import operator_token, operator_tokens
from halfmoon_runtime.observability.route_doc import RouteDoc

KEY = "a key of many characters"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def opened(
    tokens: Sequence[str] = (),
    ready: bool = True,
    add: Any = None,
    hosts: AllowedHosts | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    registry = CollectorRegistry()
    Counter("loaves", "Loaves", registry=registry).inc(3)
    http = OperatorHttp(
        asyncio.get_running_loop(), lambda: ready, tokens=tokens, hosts=hosts, registry=registry
    )
    if add is not None:
        add(http)
    http.start(0, "127.0.0.1")
    try:
        async with httpx.AsyncClient(
            base_url=http.url("127.0.0.1"), trust_env=False, timeout=30
        ) as client:
            yield client
    finally:
        await asyncio.to_thread(http.stop)


def bakery(http: OperatorHttp) -> None:
    async def loaf(question: OperatorRequest) -> object:
        if question.parts["name"] == "stone":
            raise OperatorHttpError(
                404, "no such loaf", param="name", code="loaf_not_found", retry_after_s=1.5
            )
        if question.parts["name"] == "burnt":
            raise ValueError("the secret recipe")
        return {**question.parts, **question.query}

    async def bake(question: OperatorRequest) -> object:
        return {"baked": question.body.decode()}

    http.add("GET", "/loaves/{name}", loaf)
    http.add("POST", "/loaves", bake)


async def test_metrics_health_and_readiness_are_there_for_anybody() -> None:
    async with opened(tokens=operator_tokens(KEY)) as client:
        assert "loaves_total 3.0" in (await client.get("/metrics")).text
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).status_code == 200
    async with opened(ready=False) as client:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_a_service_answers_what_it_adds_in_json() -> None:
    async with opened(add=bakery) as client:
        answer = await client.get("/loaves/rye%20bread?size=2")
        assert answer.json() == {"name": "rye bread", "size": "2"}
        answer = await client.post("/loaves", content=b'{"n": 1}', headers=JSON)
        assert answer.json() == {"baked": '{"n": 1}'}
        assert (await client.get("/loaves/r%C3%B6ggeli")).json() == {"name": "röggeli"}
        assert (await client.get("/loaves/a%2541")).json() == {"name": "a%41"}


async def test_errors_have_the_shape_of_the_rest_api_and_tell_no_secrets() -> None:
    async with opened(add=bakery) as client:
        answer = await client.get("/loaves/stone")
        assert answer.status_code == 404 and answer.headers["retry-after"] == "2"
        assert answer.json()["error"] == {
            "message": "no such loaf", "type": "invalid_request_error", "param": "name",
            "code": "loaf_not_found",
        }  # fmt: skip
        unknown = await client.get("/cakes")
        assert unknown.status_code == 404 and "GET /cakes" in unknown.json()["error"]["message"]
        wrong = await client.get("/loaves")
        assert wrong.status_code == 405 and "POST" in wrong.json()["error"]["message"]
        failed = await client.get("/loaves/burnt")
        assert failed.status_code == 500 and "recipe" not in failed.text
        assert failed.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "text/plain"}, b"{}", 415),
        ({}, b"{}", 415),
        (JSON, b" " * (64 * 1024 + 1), 413),
    ],
)
async def test_a_body_that_a_web_page_could_send_or_that_is_too_long_is_refused(
    headers: dict[str, str], body: bytes, status: int
) -> None:
    async with opened(add=bakery) as client:
        answer = await client.post("/loaves", content=body, headers=headers)
        assert answer.status_code == status and answer.json()["error"]["message"]


async def raw_answer(url: httpx.URL, sent: str) -> str:
    """Send bytes as they are, and return all that comes back."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent.encode())
    async with asyncio.timeout(30):
        answer = (await reader.read()).decode()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [("", 400), ("Host: a\r\nhost: b\r\n", 400), ("Host: a/b\r\n", 400), ("Host: a:1\r\n", 200)],
)
async def test_a_request_has_one_host_of_the_right_form(headers: str, status: int) -> None:
    async with opened() as client:
        answer = await raw_answer(client.base_url, f"GET /health HTTP/1.1\r\n{headers}\r\n")
        assert answer.split()[1] == str(status)
        old = await raw_answer(client.base_url, "GET /metrics HTTP/1.0\r\n\r\n")
        assert old.split()[1] == "200"


async def test_head_is_answered_as_get_without_a_body() -> None:
    async with opened(add=bakery) as client:
        for path in ("/health", "/metrics", "/loaves/rye", "/loaves/stone"):
            whole = await client.get(path)
            # httpx would skip a body: these are all bytes up to the end of the connection.
            head = await raw_answer(client.base_url, f"HEAD {path} HTTP/1.0\r\n\r\n")
            assert f" {whole.status_code} " in head.partition("\r\n")[0]
            assert whole.headers["content-type"] in head
            assert whole.content and head.endswith("\r\n\r\n")


async def test_a_body_in_chunks_is_refused_rather_than_taken_for_none() -> None:
    async with opened(add=bakery) as client:
        # By hand: a client that still sends when it is answered may see a reset connection.
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = "POST /loaves HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        assert b" 411 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()


async def test_what_is_wrong_with_a_documented_request_is_named() -> None:
    class Loaf(msgspec.Struct, forbid_unknown_fields=True):
        grams: int

    async def bake(question: OperatorRequest) -> object:
        return decode_body(question.body, Loaf)

    def add(http: OperatorHttp) -> None:
        http.add("POST", "/loaves", bake, RouteDoc(query={"size": int}, body=Loaf))

    async with opened(add=add) as client:
        for path, body, param in (
            ("/loaves?colour=red", b'{"grams": 1}', "colour"),
            ("/loaves", b'{"grams": "many"}', "grams"),
            ("/loaves", b"{}", "grams"),
            ("/loaves", b'{"grams": 1, "salt": 2}', "salt"),
            ("/loaves", b"[", None),
            ("/loaves?size=%ff", b'{"grams": 1}', None),
        ):
            answer = await client.post(path, content=body, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
        right = await client.post("/loaves?size=2", content=b'{"grams": 1}', headers=JSON)
        assert right.json() == {"grams": 1}


async def test_while_a_key_is_changed_the_token_of_each_key_is_taken() -> None:
    new = f"{KEY}, changed"
    async with opened(tokens=operator_tokens(f"{KEY}\n{new}"), add=bakery) as client:
        for key, status in ((KEY, 200), (new, 200), (f"{new}\n{KEY}", 200), ("a" * 20, 401)):
            shown = {"authorization": f"Bearer {operator_token(key)}"}
            assert (await client.get("/loaves/rye", headers=shown)).status_code == status
    assert operator_token(f"{new}\n{KEY}") == operator_token(new)


SPELLINGS = [
    "/oven", "/oven/", "//oven", "/oven?token=a", "/loaves/a", "/loaves/..", "/loaves/%6detrics",
    "/metrics/../oven", "/health/", "/loaves/metrics",
]  # fmt: skip


async def test_connections_past_the_limit_are_closed_and_the_others_served() -> None:
    async with opened() as client:
        port = client.base_url.port
        assert port is not None
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
        try:
            with pytest.raises(httpx.TransportError):
                while True:  # until all of them were taken up
                    await client.get("/health", headers={"connection": "close"})
        finally:
            for each in silent:
                each.close()
        while True:
            try:
                assert (await client.get("/health")).status_code == 200
            except httpx.TransportError:
                await asyncio.sleep(0.01)
            else:
                break


@pytest.mark.parametrize(
    "method", ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "get"]
)
@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer wrong", "Bearer é", "Basic {token}", "{token}!"]
)
async def test_no_route_runs_without_the_token_whatever_the_method_and_the_spelling(
    method: str, shown: str
) -> None:
    """Whether it is there may be told; nothing is done, and nothing of it is shown."""
    token, ran = operator_token(KEY), []

    def add(http: OperatorHttp) -> None:
        async def run(question: OperatorRequest) -> object:
            ran.append(question)
            return {"secret": "recipe"}

        for verb in ("GET", "POST", "DELETE"):
            http.add(verb, "/oven", run)
            http.add(verb, "/loaves/{name}", run)

    async with opened(tokens=[token], add=add) as client:
        headers = {b"content-type": b"application/json"}
        if shown:
            headers[b"authorization"] = shown.format(token=token).encode("latin-1")
        for path in SPELLINGS:
            answer = await client.request(method, path, content=b"{}", headers=headers)
            assert answer.status_code in (200, 401, 404, 405, 501), (path, answer.status_code)
            assert answer.status_code != 200 or path == "/health/", path
            assert "recipe" not in answer.text
            if answer.status_code == 401 and method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert not ran
        with_token = {**JSON, "authorization": f"Bearer {token}"}
        answer = await client.post("/oven", content=b"{}", headers=with_token)
        assert answer.json() == {"secret": "recipe"}


async def test_a_name_that_is_not_ours_is_refused_but_for_probes() -> None:
    async with opened(add=bakery, hosts=AllowedHosts(["bakery.example"])) as client:
        for path, method in (("/metrics", "GET"), ("/loaves/rye", "GET"), ("/loaves", "POST")):
            foreign = {"host": "rebound.example", **JSON}
            refused = await client.request(method, path, headers=foreign)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (421, "host_not_allowed")
            assert "--allowed-hosts rebound.example" in error["message"]
            ours = await client.request(method, path, headers={"host": "bakery.example", **JSON})
            assert ours.status_code == 200
        for path in ("/health", "/ready"):
            probed = await client.get(path, headers={"host": "rebound.example"})
            assert probed.status_code == 200
        assert (await client.get("/loaves/rye")).status_code == 200, "by its address"
