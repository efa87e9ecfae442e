"""A condition of the HTTP client sends the ETag that the server gave, whatever that is made of."""

from collections.abc import Callable, Iterator

import pytest

from halfmoon_metadata import http_server as served
from halfmoon_metadata.http_server import value_etag
from halfmoon_metadata.stores.given_etags import GivenEtags
from halfmoon_metadata.stores.http_store import HttpStore
from tests.metadata.conftest import HttpServer

KEY = "halfmoon/members/kvstore-0"


def reversed_etag(value: bytes) -> str:
    """Return an ETag that no client would compute."""
    return f'"{value_etag(value)[-2:0:-1]}"'


@pytest.fixture
def another(
    http_server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], HttpStore]]:
    """Clients of a server whose ETags are not the SHA-256 of the value."""
    monkeypatch.setattr(served, "value_etag", reversed_etag)
    opened: list[HttpStore] = []

    def client() -> HttpStore:
        opened.append(HttpStore(f"http://127.0.0.1:{http_server.port}/metadata"))
        return opened[-1]

    yield client
    for store in opened:
        store.close()


def test_a_value_read_or_written_is_swapped_and_removed(another: Callable[[], HttpStore]) -> None:
    store, other = another(), another()
    other.put(KEY, b"1")
    assert store.get(KEY) == b"1"
    assert store.compare_and_swap(KEY, b"1", b"2")
    other.put(KEY, b"3")
    assert store.get(KEY) == b"3"
    assert store.compare_and_swap(KEY, b"3", None)
    assert other.get(KEY) is None
    # What was written needs no read.
    store.put(KEY, b"1")
    assert store.compare_and_swap(KEY, b"1", b"2")
    assert store.compare_and_swap(KEY, b"2", b"3")
    assert not store.compare_and_swap(KEY, b"1", b"4"), "the ETag is of another value"
    assert store.get(KEY) == b"3"
    assert store.compare_and_swap(KEY, b"3", None)


def test_what_no_server_gave_is_computed() -> None:
    given = GivenEtags()
    assert given.etag_of(KEY, b"1") == value_etag(b"1")
    given.keep(KEY, b"1", '"7"')
    assert given.etag_of(KEY, b"1") == '"7"'
    assert given.etag_of(KEY, b"2") == value_etag(b"2")
    assert given.etag_of("other", b"1") == value_etag(b"1")
    # A weak one never matches, and an answer without one says nothing of the next value.
    for said in ('W/"7"', "", None):
        given.keep(KEY, b"1", '"7"')
        given.keep(KEY, b"1", said)
        assert given.etag_of(KEY, b"1") == value_etag(b"1")


def test_the_etags_of_the_last_keys_are_remembered() -> None:
    given = GivenEtags(max_keys=2)
    for key in ("a", "b", "a", "c"):
        given.keep(key, b"1", f'"{key}"')
        given.check()
    assert given.etag_of("a", b"1") == '"a"'
    assert given.etag_of("b", b"1") == value_etag(b"1")
    assert given.etag_of("c", b"1") == '"c"'
