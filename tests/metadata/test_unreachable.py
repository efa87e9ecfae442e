"""A metadata server that is away, goes away, comes back, or talks nonsense."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.installed_programs import needs_programs

needs_etcd = needs_programs("etcd")

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
    servers: list[Answering] = []

    def start(answer: bytes | None) -> Answering:
        servers.append(Answering(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(params=["http", "redis", "etcd"])
def open_at(request: pytest.FixtureRequest) -> Iterator[Callable[[int], MetadataStore]]:
    opened: list[MetadataStore] = []

    def start(port: int) -> MetadataStore:
        if request.param == "http":
            opened.append(HttpStore(f"http://127.0.0.1:{port}/metadata", timeout_s=0.2))
        elif request.param == "etcd":
            opened.append(EtcdStore(f"etcd://127.0.0.1:{port}", timeout_s=0.2))
        else:
            opened.append(RedisStore(f"redis://:secret@127.0.0.1:{port}/0", timeout_s=0.2))
        return opened[-1]

    yield start
    for store in opened:
        store.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_not_there_is_named(
    open_at: Callable[[int], MetadataStore], call: str
) -> None:
    port = free_port()
    with pytest.raises(MetadataUnreachable, match=f"127.0.0.1:{port}") as caught:
        CALLS[call](open_at(port))
    assert "secret" not in str(caught.value)


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
@pytest.mark.parametrize("call", CALLS)
def test_nonsense_for_an_answer_is_an_error_of_ours(
    open_at: Callable[[int], MetadataStore],
    answering: Callable[[bytes | None], Answering],
    call: str,
    answer: bytes,
) -> None:
    with pytest.raises(MetadataError):
        CALLS[call](open_at(answering(answer).port))


@pytest.mark.parametrize("call", ["list", "increment"])
def test_a_page_that_is_not_ours_is_an_error_of_ours(
    answering: Callable[[bytes | None], Answering], call: str
) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"
    store = HttpStore(f"http://127.0.0.1:{answering(page).port}/metadata")
    with pytest.raises(MetadataError, match=r"no listing|no counter"):
        CALLS[call](store)
    store.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_does_not_know_its_name_is_an_error_with_its_reason(
    answering: Callable[[bytes | None], Answering], call: str
) -> None:
    page = b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 22\r\n\r\nset --allowed-hosts it"
    store = HttpStore(f"http://127.0.0.1:{answering(page).port}/metadata")
    with pytest.raises(MetadataRefused, match="--allowed-hosts"):
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


def test_a_server_that_comes_back_is_used_again(http_server: Any) -> None:
    port = http_server.port
    store = HttpStore(f"http://127.0.0.1:{port}/metadata", timeout_s=1)
    store.put("k", b"1")
    http_server.stop()
    with pytest.raises(MetadataUnreachable):
        store.get("k")
    again = type(http_server)(MemoryStore(), port)
    assert store.increment("n") == 1
    store.close()
    again.stop()


def test_a_redis_that_goes_away_is_unreachable_and_its_password_is_not_told(
    redis_server: Any,
) -> None:
    server = type(redis_server)()
    store = RedisStore(f"redis://127.0.0.1:{server.port}/0", timeout_s=1)
    store.put("k", b"1", ttl_s=60)
    server.stop()
    began = time.monotonic()
    for call in CALLS.values():
        with pytest.raises(MetadataUnreachable, match=str(server.port)):
            call(store)
    assert time.monotonic() - began < 30, "it does not hang"
    store.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_page_that_is_not_etcds_is_an_error_of_ours(
    answering: Callable[[bytes | None], Answering], call: str
) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n<html></html>"
    store = EtcdStore(f"etcd://127.0.0.1:{answering(page).port}")
    with pytest.raises(MetadataError, match=r"the answer is not etcd's"):
        CALLS[call](store)
    store.close()


@needs_etcd
def test_an_etcd_that_goes_away_is_unreachable() -> None:
    server = EtcdServer()
    store = EtcdStore(server.url, timeout_s=1)
    store.put("k", b"1", ttl_s=60)
    server.stop()
    for call in CALLS.values():
        with pytest.raises(MetadataUnreachable, match=str(server.port)):
            call(store)
    store.close()


@needs_etcd
def test_what_is_too_much_for_this_etcd_is_refused_in_its_words() -> None:
    with EtcdServer(max_request_bytes=100_000) as server:
        store = EtcdStore(server.url)
        with pytest.raises(MetadataRefused, match="request is too large"):
            store.put("k", b"x" * 150_000)
        store.put("k", b"x" * 50_000)
        store.close()


def test_a_store_that_fails_answers_503_and_that_is_unreachable(http_server: Any) -> None:
    class Away(MemoryStore):
        def get(self, key: str) -> bytes | None:
            raise MetadataUnreachable("the store behind is away")

    server = type(http_server)(Away())
    store = HttpStore(f"http://127.0.0.1:{server.port}/metadata")
    with pytest.raises(MetadataUnreachable, match="503 the store behind is away"):
        store.get("k")
    store.close()
    server.stop()
