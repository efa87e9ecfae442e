"""Whose records a metadata server holds: one cluster's, however its processes come and go."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest

from halfmoon_metadata import MemoryStore
from halfmoon_protocol.cluster_keys import cluster_key_id
from halfmoon_runtime.cluster_claim import CLUSTER, AnotherCluster, ClusterClaim, ClusterRecord
from halfmoon_runtime.membership import MEMBERS
from tests.runtime.service_parts import info_of, until

OLD = "the moon is made of green cheese"
NEW = "the moon is made of blue cheese"
STRANGE = "the moon is made of dark stones"
#: Steps of a change of the key, as docs/operating.md has them.
STEPS = (OLD, f"{OLD}\n{NEW}", f"{NEW}\n{OLD}", NEW)
URL = "redis://:secret@127.0.0.1:6379/0"


def claim(store: MemoryStore, key: str = OLD, url: str = URL, ttl_s: float = 60.0) -> ClusterClaim:
    return ClusterClaim(store, key, url, ttl_s=ttl_s)


def record(store: MemoryStore) -> ClusterRecord:
    value = store.get(CLUSTER)
    assert value is not None
    return msgspec.json.decode(value, type=ClusterRecord)


@contextmanager
def held(store: MemoryStore, key: str) -> Iterator[asyncio.Task[None]]:
    """A cluster with this key that lives: it renews its record often."""
    living = claim(store, key, ttl_s=0.03)
    living._ttl_s = 60.0  # its record does not run out while a slow machine stands still

    async def live() -> None:
        await living.take()
        while True:
            living._renew_now()
            await asyncio.sleep(0.005)

    task = asyncio.create_task(live())
    try:
        yield task
    finally:
        task.cancel()


async def test_all_processes_of_a_cluster_share_its_id_and_renew_one_record() -> None:
    store = MemoryStore()
    first, second = claim(store), claim(store)
    await first.take()
    written = record(store)
    await second.take()
    assert record(store).id == written.id
    assert record(store).key_ids == (cluster_key_id(OLD),)
    second._renew_now()
    beat = record(store).beat
    first._renew_now()  # it sees that another process has just renewed it
    assert record(store).beat == beat
    first._renew_now()
    assert record(store).beat == beat + 1


@pytest.mark.parametrize(("ours", "theirs"), [(OLD, STRANGE), (OLD, ""), ("", STRANGE)])
async def test_a_cluster_with_another_key_is_refused_in_one_line(ours: str, theirs: str) -> None:
    store = MemoryStore()
    with held(store, theirs):
        await until(lambda: store.get(CLUSTER))
        with pytest.raises(AnotherCluster) as refused:
            await claim(store, ours).take()
    text = str(refused.value)
    assert "\n" not in text
    for part in ("--cluster NAME", "…/1", "--metadata", record(store).id):
        assert part in text
    assert "secret" not in text and "moon" not in text
    for key in filter(None, (ours, theirs)):
        assert cluster_key_id(key) in text


async def test_a_cluster_that_has_ended_without_a_word_gives_way_when_its_lease_is_over() -> None:
    store = MemoryStore()
    await claim(store, STRANGE, ttl_s=0.05).take()
    await claim(store, OLD).take()
    assert record(store).key_ids == (cluster_key_id(OLD),)


async def test_a_record_that_stays_is_refused_after_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon_runtime.cluster_claim._LATE_S", 0.0)
    store = MemoryStore()
    await claim(store, STRANGE).take()
    with pytest.raises(AnotherCluster):
        await claim(store, OLD, ttl_s=0.01).take()


async def test_a_key_is_changed_step_by_step_and_then_the_old_one_opens_nothing() -> None:
    store = MemoryStore()
    ids = set()
    for before, after in pairwise(STEPS):
        # The processes of both steps start in any order while the step is under way.
        for key in (before, after, before, after):
            await claim(store, key).take()
            ids.add(record(store).id)
    assert len(ids) == 1
    assert record(store).key_ids == (cluster_key_id(NEW),)
    with held(store, NEW), pytest.raises(AnotherCluster):
        await claim(store, OLD).take()


async def test_a_server_that_lost_its_records_gets_the_same_id_back() -> None:
    store = MemoryStore()
    holder = claim(store)
    await holder.take()
    before = record(store).id
    store.delete(CLUSTER)
    holder._renew_now()
    assert record(store).id == before


async def test_a_living_process_leaves_the_record_to_a_cluster_that_came_first_and_logs_it_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    holder = claim(store)
    await holder.take()
    store.delete(CLUSTER)
    await claim(store, STRANGE).take()
    holder._renew_now()
    holder._renew_now()
    assert record(store).key_ids == (cluster_key_id(STRANGE),)
    assert capsys.readouterr().out.count("another_cluster") == 1


@pytest.mark.parametrize("there", [b"", b"\xff", b"[]", b'{"id": 7}', b"x" * 10_000, b"[" * 4000])
async def test_a_record_that_is_none_is_replaced(there: bytes) -> None:
    store = MemoryStore()
    store.put(CLUSTER, there)
    await claim(store).take()
    assert record(store).key_ids == (cluster_key_id(OLD),)


def with_member(key_id: str) -> MemoryStore:
    """A store with the record of a worker, and none of its cluster."""
    store = MemoryStore()
    store.put(MEMBERS + "kvstore-0", msgspec.json.encode(info_of("kvstore-0", key_id=key_id)))
    return store


async def test_members_of_an_older_release_show_that_another_cluster_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon_runtime.cluster_claim._LATE_S", 0.0)
    store = with_member(cluster_key_id(STRANGE))
    with pytest.raises(AnotherCluster, match=r"kvstore-0 of another cluster.*--cluster NAME"):
        await claim(store, ttl_s=0.01).take()
    assert store.get(CLUSTER) is None


@pytest.mark.parametrize("key_id", [cluster_key_id(OLD), ""])
async def test_members_of_this_cluster_without_such_a_record_are_joined(key_id: str) -> None:
    store = with_member(key_id)
    await claim(store).take()
    assert record(store).key_ids == (cluster_key_id(OLD),)
