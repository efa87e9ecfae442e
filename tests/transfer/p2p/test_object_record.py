"""The record of an object: read and written whole, whoever changes it meanwhile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon_metadata import MemoryStore
from halfmoon_protocol.regions import Region
from halfmoon_transfer.p2p import P2PError
from halfmoon_transfer.p2p import object_record as records
from halfmoon_transfer.p2p.object_catalog import ObjectCatalog
from halfmoon_transfer.p2p.object_record import BufferPlace, ObjectRecord, ShardHolder, ShardSource


def checked(catalog: ObjectCatalog, name: str) -> ObjectRecord:
    record = catalog.read(name)
    assert record is not None
    record.check()
    return record


def holder(name: str, shards: set[int], n_shards: int, *, gold: bool = False) -> ShardHolder:
    source = ShardSource(name, 1)
    region = Region(name, 1, bytes(16), 10 * n_shards)
    return ShardHolder(source, gold, (BufferPlace(region),), records.bitmap(shards, n_shards))


def record_of(n_shards: int, *holders: ShardHolder) -> ObjectRecord:
    return ObjectRecord(
        name="x",
        publication="p",
        sizes=(10 * n_shards,),
        shard_bytes=10,
        checksums=(bytes(16),) * n_shards,
        holders=holders,
    )


@given(shards=st.sets(st.integers(0, 40)), n_bytes=st.integers(401, 410))
def test_a_record_is_read_as_it_was_written(shards: set[int], n_bytes: int) -> None:
    record = record_of(41, holder("a", shards, 41))
    record = msgspec.structs.replace(record, sizes=(n_bytes,))
    again = records.decode(records.encode(record))
    assert again == record
    assert again.holders[0].shards == shards
    assert [each.length for each in records.cut_shards((n_bytes,), 10)] == [10] * 40 + [
        n_bytes - 400
    ]


@pytest.mark.parametrize(
    "spoil",
    [
        {"sizes": [-1]},
        {"sizes": [10]},
        {"sizes": [10**30]},
        {"sizes": [10**18]},
        {"shard_bytes": 0},
        {"checksums": ["AA=="] * 3},
        {"labels": ["a", "b"]},
        {"holders": [{"source": {"segment": "a", "generation": 1}}]},
        {"holder": {"bitmap": "AAA="}},
        {"holder": {"bitmap": "CA=="}},
        {"holder": {"places": []}},
        {"holder": {"places": [None]}},
    ],
)
def test_a_broken_record_or_a_holder_that_does_not_fit_is_not_believed(
    spoil: dict[str, Any],
) -> None:
    fields = msgspec.json.decode(records.encode(record_of(3, holder("a", {0}, 3))))
    fields["holders"][0] |= spoil.pop("holder", {})
    with pytest.raises(ValueError, match=r".+"):
        records.decode(msgspec.json.encode(fields | spoil))
    store = MemoryStore()
    store.put(records.PREFIX + "x", msgspec.json.encode(fields | spoil))
    with pytest.raises(P2PError, match="the record of object x is broken"):
        ObjectCatalog(store).read("x")


class Contended(MemoryStore):
    """Lets another client's change in between a read and the swap that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.intruders: list[Callable[[], object]] = []

    def compare_and_swap(self, *arguments: Any, **options: Any) -> bool:
        if self.intruders:
            self.intruders.pop()()
        return super().compare_and_swap(*arguments, **options)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_changes_that_race_are_all_in_the_record(data: st.DataObject) -> None:
    """Each client announces and leaves in its own order; the swaps interleave at will."""
    n_shards = 9
    store = Contended()
    catalog = ObjectCatalog(store, pause_s=0)
    catalog.change("x", lambda before: record_of(n_shards, holder("gold", set(range(9)), 9)))
    expected: dict[str, frozenset[int]] = {"gold": frozenset(range(9))}
    histories = {}
    for name in "abc":
        steps = data.draw(
            st.lists(st.one_of(st.none(), st.frozensets(st.integers(0, 8))), max_size=4)
        )
        histories[name] = [(name, step) for step in steps]
        if steps and steps[-1] is not None:
            expected[name] = steps[-1]

    def apply(name: str, step: frozenset[int] | None) -> None:
        def change(before: ObjectRecord | None) -> ObjectRecord | None:
            assert before is not None
            if step is None:
                return before.without({ShardSource(name, 1)})
            return before.with_holder(holder(name, set(step), n_shards))

        catalog.change("x", change)

    # One client's steps keep their order; each may get in between another's read and swap.
    while any(histories.values()):
        names = [name for name, left in histories.items() if left]
        name = data.draw(st.sampled_from(names))
        mine = histories[name].pop(0)
        others = [each for each in names if each != name and histories[each]]
        between = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        for other in between:
            store.intruders.append(partial(apply, *histories[other].pop(0)))
        apply(*mine)
        while store.intruders:  # A change that changes nothing swaps nothing.
            store.intruders.pop()()
    record = checked(catalog, "x")
    assert {each.source.segment: each.shards for each in record.holders} == expected
