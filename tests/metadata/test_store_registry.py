"""Stores by URL, and what only the one in memory has."""

import pytest

from halfmoon_metadata import MemoryStore, MetadataRefused, open_store
from halfmoon_metadata.stores.etcd_store import EtcdStore
from halfmoon_metadata.stores.http_store import HttpStore
from halfmoon_metadata.stores.redis_store import RedisStore
from halfmoon_runtime.clock import FakeClock


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


SCHEMES = "memory://, http://, https://, redis://, rediss://, etcd://, etcds://"
VERIFIED = "always verified; HALFMOON_TLS_CA"
REFUSED = {
    SCHEMES: ["", "zookeeper://localhost", "localhost:6379", "P2PHANDSHAKE", "gopher://u:s3cr3t@h"],
    "metadata URL": [
        *("http://", "redis:///0", "http:///metadata", "redis://u:s3cr3t@/0", "etcd://"),
        *("http://x:port/", "redis://u:s3cr3t@h:port/0", "redis://u:s3cr3t@h:0/0", "etcd://x:0"),
        *(
            "redis://u:s3cr3t@[h/0",
            "redis://u:s3cr3t@with@s3cr3t@h:0/0",
            "http://u:s3cr3t@h:99999999/metadata",
        ),
        # What etcd's can't say.
        *("etcd://user:s3cr3t@x/folder", "etcd://x?y=1", "etcd://a:1,b:2"),
        *("etcd://user@x", "etcd://:s3cr3t@x"),
    ],
    VERIFIED: [
        f"rediss://:s3cr3t@127.0.0.1:6379/0?{option}"
        for option in ("ssl_cert_reqs=none", "ssl_check_hostname=no", "ssl_exclude_verify_flags=x")
    ],
}


@pytest.mark.parametrize(
    ("url", "reason"), [(url, reason) for reason, urls in REFUSED.items() for url in urls]
)
def test_a_url_that_is_refused_keeps_its_password(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        open_store(url)
    assert "s3cr3t" not in str(refused.value)


def test_a_full_memory_store_refuses_more_until_something_goes() -> None:
    clock = FakeClock()
    store = MemoryStore(clock.now, max_bytes=100)
    store.put("a", b"x" * 50)
    store.put("b", b"x" * 40, ttl_s=5)
    with pytest.raises(MetadataRefused, match="limit is 100"):
        store.put("c", b"x" * 20)
    store.put("a", b"x" * 55)  # a record that is replaced makes room for itself
    store.check()
    clock.advance(5)
    store.put("c", b"x" * 40)
    store.check()
    assert store.list("").keys() == {"a", "c"}


def test_renewing_a_lease_for_ever_takes_no_more_memory() -> None:
    clock = FakeClock()
    store = MemoryStore(clock.now)
    for _ in range(10_000):
        store.put("k", b"v", ttl_s=80_000)
    store.check()
    assert len(store._deadlines) < 2000
