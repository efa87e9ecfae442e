"""Segment files: what is found after a process ended at any moment, and what never is."""

from pathlib import Path

import pytest
import xxhash

from halfmoon_kvstore.disk import Disk, DiskInUse
from halfmoon_kvstore.segment import Segment, blocks_in
from halfmoon_kvstore.segment_front import SegmentShape, read_front
from halfmoon_kvstore.slot_header import Found
from halfmoon_kvstore.testing import SMALL, content
from halfmoon_protocol.ids import BlockHash
from halfmoon_protocol.layout import KvLayout
from halfmoon_scheduling.disk_map import BlockRecord
from halfmoon_scheduling.tier_commands import Erase, Outcome, Promote, WriteBack

SHAPE = SegmentShape(SMALL, 70)
ODD = KvLayout(model="m", n_layers=3, n_kv_heads=1, head_dim=25, dtype="float32", block_size=17)


def block(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def record(i: int, n_bytes: int = SMALL.block_bytes) -> BlockRecord:
    checksum = xxhash.xxh3_64_intdigest(content(block(i), n_bytes))
    return BlockRecord(block(i), block(i - 1) if i else None, i, checksum)


def store(segment: Segment, i: int, slot: int) -> None:
    found = Found(slot, record(i), sequence=i + 1)
    segment.write(found, 1, memoryview(bytearray(content(block(i), SMALL.block_bytes))))


def opened(path: Path) -> Segment:
    """As the next start opens it."""
    return Segment(path, SHAPE, read_front(path))


def found(path: Path) -> list[Found]:
    """What a file has, read without a change and by the next start alike."""
    there = blocks_in(path)
    segment = opened(path)
    try:
        assert list(segment.blocks()) == there
        return there
    finally:
        segment.close()


def test_what_was_written_is_found_and_read_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    segment = Segment(path, SHAPE)
    for i in range(70):
        store(segment, i, 69 - i)
    segment.close()
    assert found(path) == [Found(slot, record(69 - slot), 70 - slot) for slot in range(70)]
    segment = opened(path)
    view = memoryview(bytearray(SMALL.block_bytes))
    segment.read(3, view)
    assert view == content(block(66), SMALL.block_bytes)
    segment.close()


def test_a_slot_that_is_written_again_holds_nothing_until_that_is_done(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    segment = Segment(path, SHAPE)
    store(segment, 1, 5)
    with pytest.raises(TypeError):  # as far as the bytes, and no further
        segment.write(Found(5, record(2), 9), 1, None)  # type: ignore[arg-type]
    segment.close()
    assert found(path) == []


def test_blocks_that_are_no_whole_pages_are_kept_apart(tmp_path: Path) -> None:
    shape = SegmentShape.fitting(ODD, 200_000)
    assert 0 < shape.n_bytes <= 200_000
    segment = Segment(tmp_path / "s.kv", shape)
    for slot in range(shape.n_slots):
        bytes_ = memoryview(bytearray(content(block(slot), ODD.block_bytes)))
        segment.write(Found(slot, record(slot, ODD.block_bytes), slot), 1, bytes_)
    view = memoryview(bytearray(ODD.block_bytes))
    for slot in range(shape.n_slots):
        segment.read(slot, view)
        assert view == content(block(slot), ODD.block_bytes)
    segment.close()


def test_a_file_too_small_for_one_block_has_no_slots() -> None:
    assert SegmentShape.fitting(SMALL, 4 * 4096).n_slots == 0
    assert SegmentShape.fitting(SMALL, 5 * 4096).n_slots == 1


def carry(disk: Disk, i: int, slot: int, view: memoryview) -> Outcome:
    return disk.perform(WriteBack(record(i), 0, slot), view)


def test_a_disk_tells_bytes_that_changed_in_memory_or_on_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1 << 20, generation=1)
    disk.open(SMALL)
    assert list(disk.blocks()) == []
    view = memoryview(bytearray(content(block(1), SMALL.block_bytes)))
    assert carry(disk, 1, 7, view) == "ok"
    view[100] ^= 1
    assert carry(disk, 1, 8, view) == "corrupt"
    assert disk.perform(Promote(record(1), 7, 0), view) == "ok"
    assert view == content(block(1), SMALL.block_bytes)
    assert disk.perform(Promote(record(2), 7, 0), view) == "corrupt"
    assert disk.perform(Erase(7), memoryview(b"")) == "ok"
    disk.close()
    disk = Disk(tmp_path, 1 << 20, generation=2)
    assert disk.layout() == SMALL
    disk.open(SMALL)
    assert list(disk.blocks()) == []
    disk.close()


def test_blocks_are_found_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1 << 20, generation=1)
    disk.open(SMALL)
    view = memoryview(bytearray(content(block(1), SMALL.block_bytes)))
    for slot in (9, 3, 6):
        assert carry(disk, 1, slot, view) == "ok"
    disk.close()
    disk = Disk(tmp_path, 1 << 20, generation=2)
    disk.open(SMALL)
    assert [each.slot for each in disk.blocks()] == [9, 3, 6]
    disk.close()


def test_a_disk_of_another_size_or_layout_begins_empty(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1 << 20, generation=1)
    disk.open(SMALL)
    view = memoryview(bytearray(content(block(1), SMALL.block_bytes)))
    assert carry(disk, 1, 9, view) == "ok"
    disk.close()
    disk = Disk(tmp_path, 2 << 20, generation=2)
    disk.open(SMALL)
    assert list(disk.blocks()) == []
    disk.close()


def test_a_folder_is_one_process_own(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 1 << 20, generation=1)
    with pytest.raises(DiskInUse, match="give each kvstore its own"):
        Disk(tmp_path, 1 << 20, generation=2)
    disk.close()
    Disk(tmp_path, 1 << 20, generation=2).close()
