"""A Redis whose memory is full, as ``maxmemory-policy noeviction`` leaves it: leases go on."""

from collections.abc import Iterator

import pytest
import redis

from halfmoon_metadata import MetadataError, open_store
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_metadata.store_registry import open_values
from tests.metadata.conftest import RedisServer, until

MIB = 2**20


@pytest.fixture
def limited(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis with some MiB for others' keys."""
    redis_server.client.flushall()
    used = redis_server.client.info("memory")["used_memory"]
    redis_server.client.config_set("maxmemory", used + 16 * MIB)
    yield redis_server
    redis_server.client.config_set("maxmemory", 0)
    redis_server.client.flushall()


@pytest.fixture
def store(limited: RedisServer) -> Iterator[MetadataStore]:
    opened = open_store(limited.url)
    yield opened
    opened.close()


def fill(server: RedisServer) -> None:
    n = 0
    for size in (MIB, 16_000, 200):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            while True:
                n += 1
                server.client.set(f"others/{n}", bytes(size))


def test_the_lease_of_a_record_is_renewed_while_no_new_one_is_taken(
    limited: RedisServer, store: MetadataStore
) -> None:
    store.put("there", b"1", ttl_s=1.0)
    assert store.compare_and_swap("member", None, b"2", ttl_s=1.0)
    fill(limited)
    assert store.compare_and_swap("member", b"2", b"2", ttl_s=60)
    store.put("there", b"1", ttl_s=60)
    assert min(limited.client.ttl("member"), limited.client.ttl("there")) > 30
    with pytest.raises(MetadataError, match="maxmemory"):
        store.put("new", bytes(10_000), ttl_s=60)
    with pytest.raises(MetadataError, match="maxmemory"):
        store.compare_and_swap("member", b"2", bytes(10_000), ttl_s=60)
    assert store.get("member") == b"2"
    store.put("there", b"1")  # for ever
    assert limited.client.ttl("there") == -1


def test_values_leave_room_for_members_records(limited: RedisServer, store: MetadataStore) -> None:
    values = open_values(limited.url, ttl_s=60, max_bytes=1000 * MIB)
    for n in range(40):
        assert values.put("ann", f"r{n}", bytes(MIB)), "its older ones make room"
    assert values.get("ann", "r39") == bytes(MIB)
    assert values.get("ann", "r0") is None
    info = limited.client.info("memory")
    assert info["used_memory"] < 0.8 * info["maxmemory"]
    store.put("member", bytes(2 * MIB), ttl_s=60)
    values.close()


def test_a_value_that_finds_no_room_is_not_kept(limited: RedisServer) -> None:
    values = open_values(limited.url, ttl_s=60, max_bytes=1000 * MIB)
    assert values.put("ann", "before", b"1")
    fill(limited)
    assert not values.put("ann", "after", b"2")
    assert (values.get("ann", "before"), values.get("ann", "after")) == (None, None)
    limited.client.flushall()
    until(lambda: values.put("ann", "after", b"2"))
    values.close()
