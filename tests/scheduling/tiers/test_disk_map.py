"""The slots of a disk: which block goes for another, and what a restart finds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from halfmoon_protocol.ids import BlockHash
from halfmoon_scheduling.tiers.disk_map import BlockRecord, DiskBlock, DiskMap


def record(name: str) -> BlockRecord:
    """The block named by all of these letters; its parent is named by all but the last."""
    parent = BlockHash(name[:-1].encode()) if len(name) > 1 else None
    return BlockRecord(BlockHash(name.encode()), parent, len(name) - 1, 2**64 - 1 - len(name))


def put(disk: DiskMap, name: str) -> bytes | None:
    """Store a block; the one that went for it."""
    slot, gone = disk.allocate(lambda block: False)
    assert slot is not None
    disk.store(slot, record(name))
    disk.check()
    return gone


def test_a_parent_goes_after_its_children_whenever_it_came() -> None:
    disk = DiskMap(3)
    for name in ("a", "ab", "abc"):
        put(disk, name)
    assert [put(disk, name) for name in "xyz"] == [b"abc", b"ab", b"a"]


def test_the_child_that_came_last_is_the_successor_as_long_as_it_is_here() -> None:
    disk = DiskMap(2)
    put(disk, "ab")
    assert disk.successor(BlockHash(b"a")) == b"ab"
    put(disk, "ac")
    assert disk.successor(BlockHash(b"a")) == b"ac"
    disk.release(disk.forget(BlockHash(b"ac")))
    assert disk.successor(BlockHash(b"a")) is None
    assert put(disk, "x") is None
    assert disk.successor(BlockHash(b"a")) is None, "what lies in its row now is no child"


def test_after_a_restart_the_latest_write_of_a_block_counts_and_the_first_written_goes_first() -> (
    None
):
    disk = DiskMap(4)
    disk.restore([DiskBlock(record("a"), 3), DiskBlock(record("b"), 1), DiskBlock(record("a"), 0)])
    disk.check()
    found = disk.get(BlockHash(b"a"))
    assert found is not None and found.slot == 0
    assert [put(disk, name) for name in "xyz"] == [None, None, b"b"]


def test_slots_that_a_disk_gains_are_used_after_the_present_ones() -> None:
    disk = DiskMap(0)
    assert disk.allocate(lambda block: False) == (None, None)
    disk.grow(1)
    assert put(disk, "a") is None
    disk.grow(2)
    disk.check()
    assert [put(disk, name) for name in "bcd"] == [None, None, b"a"]
    found = disk.get(BlockHash(b"c"))
    assert found is not None and found.slot == 2


class DiskOfAFew(RuleBasedStateMachine):
    """A disk of four slots or more and a handful of names, with its audit after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = DiskMap(4, policy="patience")
        self.stored: set[str] = set()

    @rule(name=st.text("ab", min_size=1, max_size=3), busy=st.sets(st.text("ab", max_size=3)))
    def put(self, name: str, busy: set[str]) -> None:
        if name in self.stored:
            return
        slot, gone = self.disk.allocate(lambda block: block.decode() in busy)
        if gone is not None:
            self.stored.remove(gone.decode())
            assert gone.decode() not in busy
            assert not any(each[:-1] == gone.decode() for each in self.stored)
        if slot is not None:
            self.disk.store(slot, record(name))
            self.stored.add(name)

    @rule(name=st.text("ab", min_size=1, max_size=3))
    def forget(self, name: str) -> None:
        if name in self.stored:
            self.disk.release(self.disk.forget(BlockHash(name.encode())))
            self.stored.remove(name)

    @rule(n_slots=st.integers(0, 2))
    def grow(self, n_slots: int) -> None:
        self.disk.grow(n_slots)

    @rule(name=st.text("ab", min_size=1, max_size=3))
    def touch(self, name: str) -> None:
        self.disk.touch([BlockHash(name.encode())])

    @invariant()
    def is_what_was_put(self) -> None:
        self.disk.check()
        assert {block.decode() for block in self.disk.hashes()} == self.stored
        assert len(self.disk) == len(self.stored)
        for name in self.stored:
            found = self.disk.get(BlockHash(name.encode()))
            assert found is not None and found.record == record(name)


TestDiskOfAFew = DiskOfAFew.TestCase
TestDiskOfAFew.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
