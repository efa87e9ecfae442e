"""Clusters with names of their own in one metadata server: none meets a record of another."""

import pytest

from halfmoon_metadata import MemoryStore, MetadataStore, open_store
from halfmoon_metadata.cluster_namespace import (
    DEFAULT_CLUSTER,
    in_cluster,
)
from halfmoon_metadata.store_registry import open_values
from tests.metadata.conftest import RedisServer, Subject

KEY = "halfmoon/members/kvstore-0"


def two_clusters(records: MetadataStore) -> tuple[MetadataStore, MetadataStore]:
    return in_cluster(records, "east"), in_cluster(records, "west")


def test_two_clusters_have_records_and_counters_of_their_own(subject: Subject) -> None:
    east, west = two_clusters(subject.store)
    east.put(KEY, b"of the east", ttl_s=30)
    assert west.get(KEY) is None
    assert west.compare_and_swap(KEY, None, b"of the west", ttl_s=30)
    assert east.list("halfmoon/") == {KEY: b"of the east"}
    assert west.list("") == {KEY: b"of the west"}
    assert [each.increment("starts") for each in (east, east, west)] == [1, 2, 1]
    assert west.delete(KEY)
    assert not west.delete(KEY)
    assert east.get(KEY) == b"of the east"
    # The default cluster has the keys of the protocol, and sees no others.
    default = in_cluster(subject.store, DEFAULT_CLUSTER)
    default.put(KEY, b"ours")
    assert subject.store.get(KEY) == b"ours"
    assert default.list("halfmoon/members/") == {KEY: b"ours"}
    assert subject.store.get(f"clusters/east/{KEY}") == b"of the east"


def test_a_store_is_opened_for_one_cluster_by_its_name() -> None:
    records = open_store("memory://shared-by-clusters")
    open_store("memory://shared-by-clusters", cluster="east").put(KEY, b"theirs")
    assert records.get(KEY) is None
    assert records.get(f"clusters/east/{KEY}") == b"theirs"


def test_a_name_that_no_cluster_can_have_is_refused_with_the_flag_and_the_limit() -> None:
    for name in ("", "a/b", "ü", "x" * 65, "a b", "a\n"):
        with pytest.raises(ValueError, match=r"--cluster \(HALFMOON_CLUSTER\).* 1 to 64 letters"):
            in_cluster(MemoryStore(), name)
        with pytest.raises(ValueError, match="--cluster"):
            open_store("redis://127.0.0.1:1/0", cluster=name)


def test_stored_answers_of_two_clusters_in_one_redis_are_apart(redis_server: RedisServer) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/3"
    limits = {"ttl_s": 60.0, "max_bytes": 1000}
    east, west, default = (
        open_values(url, **limits, cluster=name)  # type: ignore[arg-type]
        for name in ("east", "west", DEFAULT_CLUSTER)
    )
    try:
        assert east.put("tenant", "resp_1", b"secret of the east")
        assert west.get("tenant", "resp_1") is None
        assert default.get("tenant", "resp_1") is None
        assert east.get("tenant", "resp_1") == b"secret of the east"
    finally:
        for each in (east, west, default):
            each.close()
