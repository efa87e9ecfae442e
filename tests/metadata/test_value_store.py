"""Values that end by themselves, within a limit for each owner: in memory, and in a real Redis."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from halfmoon_metadata import MetadataError
from halfmoon_metadata.store_registry import open_values
from halfmoon_metadata.stores.memory_values import MemoryValues
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_metadata.value_store import ValueStore
from tests.metadata.conftest import RedisServer, until

OpenStore = Callable[..., ValueStore]


@pytest.fixture(params=["memory", "redis"])
def open_store(request: pytest.FixtureRequest) -> Iterator[OpenStore]:
    """Open stores of the same values, one after the other."""
    url = "embedded"
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        server.client.flushall()
        url = server.url
    opened: list[ValueStore] = []

    def open_it(ttl_s: float = 60.0, max_bytes: int = 1000) -> ValueStore:
        opened.append(open_values(url, ttl_s=ttl_s, max_bytes=max_bytes))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def test_a_value_is_its_owners_alone(open_store: OpenStore) -> None:
    store = open_store()
    assert store.put("ann", "a", b"1")
    assert store.put("bob", "a", b"2")
    assert (store.get("ann", "a"), store.get("bob", "a")) == (b"1", b"2")
    assert store.get("ann", "b") is None
    assert store.delete("ann", "a")
    assert not store.delete("ann", "a")
    assert (store.get("ann", "a"), store.get("bob", "a")) == (None, b"2")
    for value in (b"", bytes(range(256)), "半".encode()):
        store.put("ann", "a", value)
        assert store.get("ann", "a") == value


def test_a_value_ends(open_store: OpenStore) -> None:
    store = open_store(ttl_s=0.2)
    store.put("ann", "a", b"1")
    until(lambda: store.get("ann", "a") is None)
    assert not store.delete("ann", "a")
    store.put("ann", "a", b"2")
    assert store.get("ann", "a") == b"2"


def test_a_value_ends_at_redis_while_a_newer_one_keeps_the_keys(redis_server: RedisServer) -> None:
    store = open_values(f"redis://127.0.0.1:{redis_server.port}/0", ttl_s=60, max_bytes=1000)
    for name in "ab":
        store.put("eve", name, b"1")
    redis_server.client.zadd("halfmoon-values:{eve}:ends", {"a": 1})  # long ago
    assert (store.get("eve", "a"), store.get("eve", "b")) == (None, b"1")
    assert (store.delete("eve", "a"), store.delete("eve", "b")) == (False, True)
    store.close()


def test_the_oldest_of_an_owner_make_room_and_no_others_do(open_store: OpenStore) -> None:
    store = open_store(max_bytes=100)
    store.put("bob", "a", bytes(100))
    for name in "abcde":
        assert store.put("ann", name, bytes(40))
    assert [store.get("ann", name) is not None for name in "abcde"] == [False] * 3 + [True] * 2
    store.put("ann", "d", bytes(60))  # it replaces itself
    assert [store.get("ann", name) is not None for name in "de"] == [True, True]
    store.put("ann", "f", bytes(100))
    assert [store.get("ann", name) is not None for name in "def"] == [False, False, True]
    assert store.get("bob", "a") is not None


def test_what_is_too_large_changes_nothing_and_deletes_make_room(open_store: OpenStore) -> None:
    store = open_store(max_bytes=100)
    store.put("ann", "a", bytes(100))
    assert not store.put("ann", "b", bytes(101))
    assert store.get("ann", "a") == bytes(100)
    assert store.get("ann", "b") is None
    for number in range(50):
        store.put("ann", f"v{number}", bytes(30))
        assert store.delete("ann", f"v{number}")
    for name in "abc":
        store.put("ann", name, bytes(33))
    assert all(store.get("ann", name) is not None for name in "abc")


def test_what_is_no_name_is_refused(open_store: OpenStore) -> None:
    store = open_store()
    for name in ("", "a" * 129, "a b", "a{b}", "a\n"):
        with pytest.raises(ValueError, match="is no name"):
            store.put("ann", name, b"")
        with pytest.raises(ValueError, match="is no name"):
            store.get(name, "a")


def test_threads_share_a_store(open_store: OpenStore) -> None:
    store = open_store(max_bytes=1000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"owner{n % 3}", f"v{n}", bytes(90)), range(200)))
    for owner in range(3):
        kept = [n for n in range(200) if store.get(f"owner{owner}", f"v{n}") is not None]
        assert len(kept) == 11  # as many as there is room for


def test_memory_forgets_owners_whose_values_have_ended() -> None:
    now = [0.0]
    store = MemoryValues(ttl_s=10, max_bytes=100, clock=lambda: now[0])
    for number in range(100):
        store.put(f"owner{number}", "a", b"1")
    now[0] = 10.0
    store.put("ann", "a", b"1")
    assert list(store._owners) == list(store._n_bytes) == ["ann"]


def test_a_server_that_is_not_there_is_an_error_of_the_store() -> None:
    store = open_values(f"redis://127.0.0.1:{free_port()}/0", ttl_s=1, max_bytes=100)
    with pytest.raises(MetadataError, match="metadata server redis://127"):
        store.put("ann", "a", b"1")
