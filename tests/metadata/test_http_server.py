"""The metadata protocol as others see it: Mooncake's engine, curl, and who gets it wrong."""

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from halfmoon_metadata import MemoryStore
from halfmoon_metadata.http_server import MetadataResponse, handle_request, value_etag
from halfmoon_metadata.store_interface import MAX_KEY_CHARS, MAX_VALUE_BYTES
from tests.metadata.conftest import HttpServer


def ask(
    store: MemoryStore,
    method: str,
    query: dict[str, str],
    *,
    path: str = "",
    body: bytes = b"",
    **headers: str,
) -> MetadataResponse:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return handle_request(store, method, path, query, names, body)


def test_a_condition_decides_whether_anything_changes() -> None:
    store = MemoryStore()
    key = {"key": "k"}
    assert ask(store, "PUT", key, body=b"1", if_match=value_etag(b"0")).status == 412
    assert ask(store, "PUT", key, body=b"1", if_none_match="*").status == 200
    assert ask(store, "PUT", key, body=b"2", if_none_match="*").status == 412
    assert ask(store, "PUT", key, body=b"2", if_match=value_etag(b"0")).status == 412
    assert ask(store, "PUT", key, body=b"2", if_match=value_etag(b"1")).status == 200
    assert ask(store, "DELETE", key, if_match=value_etag(b"1")).status == 412
    assert ask(store, "DELETE", key, if_none_match="*").status == 412
    both = {"if_match": value_etag(b"2"), "if_none_match": "*"}
    assert ask(store, "PUT", key, body=b"3", **both).status == 412, "nothing fulfils both"
    assert store.get("k") == b"2"
    assert ask(store, "DELETE", key, if_match=value_etag(b"2")).status == 200
    assert ask(store, "DELETE", key, if_none_match="*").status == 200


def test_a_swap_that_is_overtaken_looks_again() -> None:
    class Overtaken(MemoryStore):
        """Another writer comes between the look and the swap, once."""

        others = [b"other", b"1"]  # noqa: RUF012

        def compare_and_swap(self, *args: Any, **kwargs: Any) -> bool:
            if self.others:
                self.put("k", self.others.pop(0))
            return super().compare_and_swap(*args, **kwargs)

    store = Overtaken()
    store.put("k", b"1")
    assert ask(store, "PUT", {"key": "k"}, body=b"2", if_match=value_etag(b"1")).status == 412
    assert store.get("k") == b"other"
    store.put("k", b"0")
    store.others = [b"0"]
    assert ask(store, "PUT", {"key": "k"}, body=b"2", if_match=value_etag(b"0")).status == 200
    assert store.get("k") == b"2"


def test_listings_and_counters_are_json() -> None:
    store = MemoryStore()
    store.put("a/1", b"\xff\x00")
    store.put("b", b"")
    listing = ask(store, "GET", {"prefix": "a/"})
    assert json.loads(listing.body) == {"a/1": base64.b64encode(b"\xff\x00").decode()}
    assert json.loads(ask(store, "GET", {"prefix": ""}).body).keys() == {"a/1", "b"}
    assert ask(store, "POST", {"key": "n"}, path="/increment").body == b"1"
    assert ask(store, "POST", {"key": "n"}, path="/increment").body == b"2"


@pytest.mark.parametrize(
    ("method", "path", "query", "status", "says"),
    [
        ("GET", "", {}, 400, "key is missing"),
        ("PUT", "", {"prefix": "x"}, 400, "key is missing"),
        ("GET", "", {"key": ""}, 400, "empty"),
        ("GET", "", {"key": "x" * (MAX_KEY_CHARS + 1)}, 400, str(MAX_KEY_CHARS)),
        ("GET", "", {"prefix": "x" * (MAX_KEY_CHARS + 1)}, 400, str(MAX_KEY_CHARS)),
        ("PUT", "", {"key": "k", "ttl_s": "soon"}, 400, "soon"),
        ("PUT", "", {"key": "k", "ttl_s": "-1"}, 400, "-1"),
        ("PUT", "", {"key": "k", "ttl_s": "nan"}, 400, "nan"),
        ("PUT", "", {"key": "k", "ttl": "1"}, 400, "ttl_s"),
        ("POST", "", {"key": "k"}, 405, "POST"),
        ("GET", "/increment", {"key": "k"}, 405, "GET"),
        ("GET", "/nothing", {"key": "k"}, 404, "/nothing"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(
    method: str, path: str, query: dict[str, str], status: int, says: str
) -> None:
    response = ask(MemoryStore(), method, query, path=path)
    assert response.status == status
    assert says in response.body.decode()


def test_a_condition_that_makes_no_sense_is_refused_and_so_is_a_counter_that_is_none() -> None:
    store = MemoryStore()
    for conditions in ({"if_match": "x"}, {"if_match": ""}, {"if_none_match": '"etag"'}):
        assert ask(store, "PUT", {"key": "k"}, body=b"1", **conditions).status == 400
        assert store.get("k") is None
    store.put("k", b"text")
    response = ask(store, "POST", {"key": "k"}, path="/increment")
    assert response.status == 400
    assert b"not a counter" in response.body


@pytest.fixture
def url(http_server: HttpServer) -> str:
    return f"http://127.0.0.1:{http_server.port}/metadata"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as client:
        yield client


def test_the_server_speaks_it_on_a_socket(url: str, client: httpx.Client) -> None:
    key = {"key": "mooncake/rpc_meta/a b&c=d"}
    for value in (b'{"ip": 0}', b'{"ip": 1}'):  # again is no error
        assert client.put(url, params=key, content=value).status_code == 200
    answer = client.get(url, params=key)
    assert (answer.status_code, answer.content) == (200, b'{"ip": 1}')
    # As libcurl escapes it, and as a browser would.
    assert client.get(url + "?key=mooncake%2Frpc_meta%2Fa%20b%26c%3Dd").status_code == 200
    assert client.get(url + "?key=mooncake/rpc_meta/a+b%26c%3Dd").status_code == 200
    assert client.get(url, params={"key": "other"}).status_code == 404
    assert client.get(url + "?key=%ff").status_code == 400
    assert client.get(url + "/?prefix=mooncake").json().keys() == {key["key"]}
    # HEAD is answered as GET, without the body.
    for query in (key, {"prefix": ""}, {"key": "other"}, {}):
        got, head = client.get(url, params=query), client.head(url, params=query)
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("content-length", "content-type", "etag"):
            assert head.headers.get(name) == got.headers.get(name)
    assert client.head(f"{url}/increment", params=key).status_code == 405
    assert [client.delete(url, params=key).status_code for _ in range(2)] == [200, 404]


def test_a_web_page_changes_nothing(url: str, client: httpx.Client) -> None:
    key, page = {"key": "n"}, {"origin": "http://elsewhere.example"}
    client.put(url, params=key, content=b"1")
    for method, path in (("POST", "/increment"), ("PUT", ""), ("DELETE", "")):
        answer = client.request(method, url + path, params=key, headers=page)
        assert answer.status_code == 403 and "Origin" in answer.text
        assert client.get(url, params=key, headers=page).content == b"1"


def test_too_large_a_body_is_cut_short(
    url: str, client: httpx.Client, http_server: HttpServer
) -> None:
    answer = client.put(url, params={"key": "k"}, content=b"x" * (MAX_VALUE_BYTES + 1))
    assert answer.status_code == 413
    assert str(MAX_VALUE_BYTES) in answer.text
    # Nor does one that says it is endless take more than that.
    with socket.create_connection(("127.0.0.1", http_server.port)) as endless:
        endless.settimeout(10)
        endless.sendall(
            b"PUT /metadata?key=k HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        answered = b""
        with suppress(OSError):
            for _ in range(64):
                endless.sendall(chunk)
        while not answered:
            answered = endless.recv(100)
        assert b" 413 " in answered
    assert client.get(url, params={"key": "k"}).status_code == 404
