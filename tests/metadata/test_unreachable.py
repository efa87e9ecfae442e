"""A metadata server that is away, goes away, comes back, or talks nonsense."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from halfmoon_metadata import (
    MemoryStore,
    MetadataError,
    MetadataRefused,
    MetadataStore,
    MetadataUnreachable,
)
from halfmoon_metadata.stores.etcd_store import EtcdStore
from halfmoon_metadata.stores.http_store import HttpStore
from halfmoon_metadata.stores.redis_store import RedisStore
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_testing.processes.etcd_server import EtcdServer
from tests.installed_programs import needs_programs, skip_without
from tests.metadata.conftest import HttpServer, RedisServer

CALLS: dict[str, Callable[[MetadataStore], object]] = {
    "get": lambda store: store.get("k"),
    "put": lambda store: store.put("k", b""),
    "delete": lambda store: store.delete("k"),
    "list": lambda store: store.list(""),
    "compare_and_swap": lambda store: store.compare_and_swap("k", None, b""),
    "increment": lambda store: store.increment("k"),
}


class Answering:
    """A TCP server that gives every connection the same bytes and hangs up."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.n_connections = 0
        self._held: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.n_connections += 1
            if self._answer is None:
                self._held.append(connection)
                continue
            with connection:
                connection.recv(65536)
                connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def answering() -> Iterator[Callable[[bytes | None], Answering]]:
    with ExitStack() as stack:

        def start(answer: bytes | None) -> Answering:
            server = Answering(answer)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(params=["http", "redis", "etcd"])
def open_at(request: pytest.FixtureRequest) -> Iterator[Callable[[int], MetadataStore]]:
    with ExitStack() as stack:

        def start(port: int) -> MetadataStore:
            store: MetadataStore
            if request.param == "http":
                store = HttpStore(f"http://u:secret@127.0.0.1:{port}/metadata", timeout_s=0.2)
            elif request.param == "etcd":
                store = EtcdStore(f"etcd://127.0.0.1:{port}", timeout_s=0.2)
            else:
                store = RedisStore(f"redis://:secret@127.0.0.1:{port}/0", timeout_s=0.2)
            stack.callback(store.close)
            return store

        yield start


def test_a_server_that_is_not_there_is_named(open_at: Callable[[int], MetadataStore]) -> None:
    port = free_port()
    store = open_at(port)
    for call in CALLS.values():
        with pytest.raises(MetadataUnreachable, match=f"127.0.0.1:{port}") as caught:
            call(store)
        assert "secret" not in f"{caught.value} {caught.value.__cause__!r}"


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_never_answers_is_given_up(
    open_at: Callable[[int], MetadataStore],
    answering: Callable[[bytes | None], Answering],
    call: str,
) -> None:
    server = answering(None)
    with pytest.raises(MetadataUnreachable, match=f"127.0.0.1:{server.port}"):
        CALLS[call](open_at(server.port))
    assert server.n_connections <= 1  # it has waited once, and does not wait again


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", bytes(range(256))], ids=repr)
def test_nonsense_for_an_answer_is_an_error_of_ours(
    open_at: Callable[[int], MetadataStore],
    answering: Callable[[bytes | None], Answering],
    answer: bytes,
) -> None:
    store = open_at(answering(answer).port)
    for call in CALLS.values():
        with pytest.raises(MetadataError):
            call(store)


def page(status: bytes, text: bytes) -> bytes:
    """An answer after which the connection is used no more."""
    head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d" % (status, len(text))
    return head + b"\r\n\r\n" + text


@pytest.mark.parametrize(
    ("open_it", "answer", "calls", "error", "told"),
    [
        pytest.param(
            lambda port: HttpStore(f"http://127.0.0.1:{port}/metadata"),
            page(b"200 OK", b"<html></html>"),
            ["list", "increment"],
            MetadataError,
            "no listing|no counter",
            id="a page that is not ours",
        ),
        pytest.param(
            lambda port: EtcdStore(f"etcd://127.0.0.1:{port}"),
            page(b"200 OK", b"<html></html>"),
            CALLS,
            MetadataError,
            "the answer is not etcd's",
            id="a page that is not etcd's",
        ),
        pytest.param(
            lambda port: HttpStore(f"http://127.0.0.1:{port}/metadata"),
            page(b"421 Misdirected Request", b"set --allowed-hosts it"),
            CALLS,
            MetadataRefused,
            "--allowed-hosts",
            id="a server that does not know its name",
        ),
    ],
)
def test_what_a_strange_server_says_is_an_error_of_ours(
    answering: Callable[[bytes | None], Answering],
    open_it: Callable[[int], MetadataStore],
    answer: bytes,
    calls: Iterable[str],
    error: type[Exception],
    told: str,
) -> None:
    store = open_it(answering(answer).port)
    for call in calls:
        with pytest.raises(error, match=told):
            CALLS[call](store)
    store.close()


@pytest.mark.parametrize(
    ("call", "n_tries"),
    [("get", 3), ("put", 3), ("list", 3), ("delete", 1), ("compare_and_swap", 1), ("increment", 1)],
)
def test_only_calls_that_do_no_harm_twice_are_sent_again(
    answering: Callable[[bytes | None], Answering], call: str, n_tries: int
) -> None:
    server = answering(b"")
    store = HttpStore(f"http://127.0.0.1:{server.port}/metadata")
    with pytest.raises(MetadataUnreachable):
        CALLS[call](store)
    assert server.n_connections == n_tries
    store.close()


def test_a_server_that_comes_back_is_used_again(http_server: HttpServer) -> None:
    port = http_server.port
    store = HttpStore(f"http://127.0.0.1:{port}/metadata", timeout_s=1)
    store.put("k", b"1")
    http_server.stop()
    with pytest.raises(MetadataUnreachable):
        store.get("k")
    again = HttpServer(MemoryStore(), port)
    assert store.increment("n") == 1
    store.close()
    again.stop()


@pytest.mark.parametrize("kind", ["redis", "etcd"])
def test_a_server_that_goes_away_is_unreachable(kind: str) -> None:
    skip_without("redis-server" if kind == "redis" else "etcd")
    server: Any = RedisServer() if kind == "redis" else EtcdServer()
    open_it: Any = RedisStore if kind == "redis" else EtcdStore
    store: MetadataStore = open_it(server.url, timeout_s=1)
    store.put("k", b"1", ttl_s=60)
    server.stop()
    for call in CALLS.values():
        with pytest.raises(MetadataUnreachable, match=str(server.port)):
            call(store)
    store.close()


@needs_programs("etcd")
def test_what_is_too_much_for_this_etcd_is_refused_in_its_words() -> None:
    with EtcdServer(max_request_bytes=100_000) as server:
        store = EtcdStore(server.url)
        with pytest.raises(MetadataRefused, match="request is too large"):
            store.put("k", b"x" * 150_000)
        store.put("k", b"x" * 50_000)
        store.close()


def test_a_store_that_fails_answers_503_and_that_is_unreachable(http_server: HttpServer) -> None:
    class Away(MemoryStore):
        def get(self, key: str) -> bytes | None:
            raise MetadataUnreachable("the store behind is away")

    http_server.store = Away()
    store = HttpStore(f"http://127.0.0.1:{http_server.port}/metadata")
    with pytest.raises(MetadataUnreachable, match="503 the store behind is away"):
        store.get("k")
    store.close()
