"""One suite for every metadata store: what members, segments and generations rely on."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from halfmoon_metadata import MetadataRefused, MetadataStore
from halfmoon_metadata.store_interface import MAX_COUNT, MAX_KEY_CHARS, MAX_TTL_S, MAX_VALUE_BYTES
from tests.metadata.conftest import Subject

BINARY = [b"", b"\x00", bytes(range(256)), b"\r\n\r\n", b"\xff\xfe", b'"quoted"', b"x" * 1_000_000]
AWKWARD_KEYS = [
    "a",
    "mooncake/ram/127.0.0.1:1234",
    "with space + plus & ampersand = equals % percent ? question # hash",
    "ключ/鍵/🌙",
    "glob*?[a-z]^\\",
    '"quotes"',
    "x" * MAX_KEY_CHARS,
    "line\nbreak\tand\x00nul",
]


def gone(store: MetadataStore, key: str, subject: Subject) -> None:
    """Wait until a record has expired."""
    deadline = time.monotonic() + 10
    while store.get(key) is not None:
        assert time.monotonic() < deadline, "the lease never ran out"
        subject.sleep(0.01)


@pytest.fixture
def store(subject: Subject) -> MetadataStore:
    return subject.store


def test_a_record_that_was_put_is_there_until_it_is_deleted(store: MetadataStore) -> None:
    assert store.get("k") is None
    store.put("k", b"1")
    store.put("k", b"2")
    assert store.get("k") == b"2"
    assert store.delete("k") is True
    assert store.delete("k") is False
    assert store.get("k") is None


def test_values_are_bytes_and_come_back_as_they_were(store: MetadataStore) -> None:
    for value in BINARY:
        store.put("k", value)
        assert store.get("k") == value
        assert store.list("k") == {"k": value}
        assert store.compare_and_swap("k", value, b"next")
        assert store.compare_and_swap("k", b"next", value)
        assert store.get("k") == value


def test_keys_are_any_text(store: MetadataStore) -> None:
    for key in AWKWARD_KEYS:
        store.put(key, b"v")
        assert store.get(key) == b"v"
        assert store.list(key[:3]) == {key: b"v"}
        assert store.compare_and_swap(key, b"v", None)
        assert store.increment(key) == 1
        assert store.delete(key)
        assert store.list("") == {}


def test_a_prefix_is_taken_literally(store: MetadataStore) -> None:
    keys = ["a*b", "axb", "a?b", "a[x]b", "a\\b", "a^b", "a-b", "ab", "b", "a*", "A*b"]
    for key in keys:
        store.put(key, key.encode())
    for prefix in ["", "a", "a*", "a?", "a[", "a[x", "a\\", "a^", "a-", "[a-z]", "*", "A", "zz"]:
        expected = {key: key.encode() for key in keys if key.startswith(prefix)}
        assert store.list(prefix) == expected, prefix


def test_many_records_are_listed(store: MetadataStore) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: store.put(f"many/{i}", str(i).encode()), range(1200)))
    assert store.list("many/") == {f"many/{i}": str(i).encode() for i in range(1200)}


def test_a_record_is_gone_when_its_lease_is_over(store: MetadataStore, subject: Subject) -> None:
    store.put("kept", b"v")
    store.put("leased", b"v", ttl_s=0.15)
    assert store.list("") == {"kept": b"v", "leased": b"v"}
    gone(store, "leased", subject)
    assert store.list("") == {"kept": b"v"}
    assert store.delete("leased") is False
    assert store.compare_and_swap("leased", b"v", b"w") is False
    assert store.compare_and_swap("leased", None, b"w") is True
    assert store.increment("counter") == 1


def test_a_lease_renewed_in_time_never_runs_out(store: MetadataStore, subject: Subject) -> None:
    store.put("by put", b"v", ttl_s=0.5)
    store.put("by swap", b"v", ttl_s=0.5)
    for _ in range(4):
        subject.sleep(0.2)
        store.put("by put", b"v", ttl_s=0.5)
        assert store.compare_and_swap("by swap", b"v", b"v", ttl_s=0.5)
    assert store.list("by ") == {"by put": b"v", "by swap": b"v"}
    gone(store, "by put", subject)
    gone(store, "by swap", subject)


def test_a_put_without_a_lease_ends_the_lease(store: MetadataStore, subject: Subject) -> None:
    for key in ("put", "swapped", "counter", "witness"):
        store.put(key, b"1", ttl_s=0.1)
    store.put("put", b"1")
    store.compare_and_swap("swapped", b"1", b"2")
    store.increment("counter")
    gone(store, "witness", subject)
    assert store.list("") == {"put": b"1", "swapped": b"2", "counter": b"2"}


def test_compare_and_swap_changes_only_what_is_as_expected(store: MetadataStore) -> None:
    assert store.compare_and_swap("k", b"1", b"2") is False
    assert store.compare_and_swap("k", b"1", None) is False
    assert store.compare_and_swap("k", None, None) is True
    assert store.get("k") is None
    assert store.compare_and_swap("k", None, b"1") is True
    assert store.compare_and_swap("k", None, b"2") is False
    assert store.compare_and_swap("k", None, None) is False
    assert store.compare_and_swap("k", b"x", b"2") is False
    assert store.get("k") == b"1"
    assert store.compare_and_swap("k", b"1", b"2") is True
    assert store.compare_and_swap("k", b"2", None) is True
    assert store.get("k") is None


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns so often that a race which is there is also seen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless_threads")
def test_of_many_that_swap_at_once_exactly_one_wins(subject: Subject) -> None:
    stores = [subject.another() for _ in range(8)]
    together = threading.Barrier(len(stores))

    def swap(store: MetadataStore, expected: bytes | None, value: bytes) -> bool:
        together.wait()
        # All write the same value, so a second winner would not be seen by it alone.
        return store.compare_and_swap("k", expected, value)

    with ThreadPoolExecutor(len(stores)) as threads:
        for n in range(300 if subject.kind == "memory" else 10):
            expected, value = str(n).encode() if n else None, str(n + 1).encode()
            assert sum(threads.map(partial(swap, expected=expected, value=value), stores)) == 1


@pytest.mark.usefixtures("restless_threads")
def test_counts_are_unique_whoever_counts(subject: Subject) -> None:
    stores = [subject.another() for _ in range(8)]

    def count(store: MetadataStore) -> list[int]:
        return [store.increment("generation") for _ in range(25)]

    with ThreadPoolExecutor(len(stores)) as threads:
        counts = list(threads.map(count, stores))
    assert all(mine == sorted(mine) for mine in counts)
    assert sorted(n for mine in counts for n in mine) == list(range(1, 201))
    assert subject.store.get("generation") == b"200"


def test_what_is_no_counter_is_not_counted_and_counts_are_exact(store: MetadataStore) -> None:
    for value in (b"no number", b"", b"1.5", b"\xff", str(MAX_COUNT).encode()):
        store.put("k", value)
        with pytest.raises(MetadataRefused, match="counter"):
            store.increment("k")
        assert store.get("k") == value
    store.put("k", str(MAX_COUNT - 1).encode())
    assert store.increment("k") == MAX_COUNT


def test_keys_and_leases_outside_the_limits_are_refused(store: MetadataStore) -> None:
    for key in ("", "x" * (MAX_KEY_CHARS + 1), "\ud800"):
        calls: list[Callable[[], object]] = [
            partial(store.get, key),
            partial(store.put, key, b""),
            partial(store.delete, key),
            partial(store.compare_and_swap, key, None, b""),
            partial(store.increment, key),
        ]
        for call in calls:
            with pytest.raises(MetadataRefused, match="key"):
                call()
    for ttl_s in (0, -1, MAX_TTL_S + 1, float("nan"), float("inf")):
        with pytest.raises(MetadataRefused, match="lease"):
            store.put("k", b"", ttl_s=ttl_s)
        with pytest.raises(MetadataRefused, match="lease"):
            store.compare_and_swap("k", None, b"", ttl_s=ttl_s)
    assert store.list("") == {}


def test_a_value_over_the_limit_is_refused(store: MetadataStore) -> None:
    store.put("k", b"x" * MAX_VALUE_BYTES)
    with pytest.raises(MetadataRefused, match=str(MAX_VALUE_BYTES)):
        store.put("k", b"y" * (MAX_VALUE_BYTES + 1))
    with pytest.raises(MetadataRefused, match=str(MAX_VALUE_BYTES)):
        store.compare_and_swap("k", None, b"y" * (MAX_VALUE_BYTES + 1))
    assert store.get("k") == b"x" * MAX_VALUE_BYTES


def test_a_listing_over_the_limit_is_refused(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon_metadata.record_limits.MAX_LISTED_RECORDS", 5)
    for i in range(6):
        store.put(f"few/{i}", b"")
    with pytest.raises(MetadataRefused, match="at most 5 records"):
        store.list("few")
    assert len(store.list("few/5")) == 1
