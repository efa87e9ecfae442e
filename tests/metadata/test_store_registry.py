"""Stores by URL, and what only the one in memory has."""

import pytest

from halfmoon_metadata import MemoryStore, MetadataRefused, open_store
from halfmoon_metadata.stores.etcd_store import EtcdStore
from halfmoon_metadata.stores.http_store import HttpStore
from halfmoon_metadata.stores.redis_store import RedisStore


class Hands:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_memory_stores_are_one_per_name() -> None:
    one = open_store("memory://opening-a")
    one.put("k", b"1")
    one.close()
    assert open_store("memory://opening-a").get("k") == b"1"
    assert open_store("memory://opening-b").get("k") is None


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://localhost:1/metadata", HttpStore),
        ("https://localhost/metadata", HttpStore),
        ("redis://localhost", RedisStore),
        ("rediss://user:password@localhost:1/3", RedisStore),
        ("etcd://localhost", EtcdStore),
        ("etcd://[::1]:2379", EtcdStore),
        ("etcds://user:password@localhost", EtcdStore),
        ("redis://[::1]:6379/0", RedisStore),
        ("http://[::1]:8000/metadata", HttpStore),
    ],
)
def test_opening_connects_to_nobody(url: str, kind: type) -> None:
    store = open_store(url)
    assert isinstance(store, kind)
    store.close()


@pytest.mark.parametrize("url", ["", "zookeeper://localhost", "localhost:6379", "P2PHANDSHAKE"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(
        ValueError, match=r"memory://, http://, https://, redis://, rediss://, etcd://, etcds://"
    ):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "redis:///0",
        "http:///metadata",
        "http://x:port/",
        "redis://x:port/0",
        "etcd://",
        "etcd://x:0",
    ],
)
def test_a_url_that_names_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="metadata URL"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://user:s3cr3t@x/folder",
        "etcd://x?y=1",
        "etcd://a:1,b:2",
        "etcd://user@x",
        "etcd://:s3cr3t@x",
    ],
)
def test_what_etcd_urls_can_not_say_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="metadata URL") as refused:
        open_store(url)
    assert "s3cr3t" not in str(refused.value)


def test_a_full_memory_store_refuses_more_until_something_goes() -> None:
    clock = Hands()
    store = MemoryStore(clock, max_bytes=100)
    store.put("a", b"x" * 50)
    store.put("b", b"x" * 40, ttl_s=5)
    with pytest.raises(MetadataRefused, match="limit is 100"):
        store.put("c", b"x" * 20)
    store.put("a", b"x" * 55)  # a record that is replaced makes room for itself
    store.check()
    clock.now = 5.0
    store.put("c", b"x" * 40)
    store.check()
    assert store.list("").keys() == {"a", "c"}


def test_renewing_a_lease_for_ever_takes_no_more_memory() -> None:
    clock = Hands()
    store = MemoryStore(clock)
    for _ in range(10_000):
        store.put("k", b"v", ttl_s=80_000)
    store.check()
    assert len(store._deadlines) < 2000
