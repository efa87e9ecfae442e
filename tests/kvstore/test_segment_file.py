"""Segment files: what is found after a process ended at any moment, and what never is."""

import shutil
from pathlib import Path

import pytest

from halfmoon_kvstore.disk_tier.segment_file import SegmentFile, scan_blocks
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder, SegmentFolderInUse
from halfmoon_kvstore.disk_tier.slot_header import SlotEntry
from halfmoon_kvstore.disk_tier.superblock import SegmentShape, read_superblock
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, TierOutcome, WriteBack
from halfmoon_testing.block_client import SMALL_LAYOUT
from halfmoon_testing.full_disk import no_files_above
from tests.kvstore.conftest import content, record

SHAPE = SegmentShape(SMALL_LAYOUT, 70)
ODD = KvLayout(model="m", n_layers=3, n_kv_heads=1, head_dim=25, dtype="float32", block_size=17)


def store(segment: SegmentFile, i: int, slot: int) -> None:
    segment.write(SlotEntry(slot, record(i), sequence=i + 1), 1, content(i))


def opened(path: Path) -> SegmentFile:
    """As the next start opens it."""
    return SegmentFile(path, SHAPE, read_superblock(path))


def found(path: Path) -> list[SlotEntry]:
    """What a file has, read without a change and by the next start alike."""
    there = scan_blocks(path)
    segment = opened(path)
    try:
        assert list(segment.blocks()) == there
        return there
    finally:
        segment.close()


def test_what_was_written_is_found_and_read_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    segment = SegmentFile(path, SHAPE)
    for i in range(70):
        store(segment, i, 69 - i)
    segment.close()
    assert found(path) == [SlotEntry(slot, record(69 - slot), 70 - slot) for slot in range(70)]
    segment = opened(path)
    view = memoryview(bytearray(SMALL_LAYOUT.block_bytes))
    segment.read(3, view)
    assert view == content(66)
    segment.close()


def test_a_slot_that_is_written_again_holds_nothing_until_that_is_done(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    segment = SegmentFile(path, SHAPE)
    store(segment, 1, 5)
    with pytest.raises(TypeError):  # as far as the bytes, and no further
        segment.write(SlotEntry(5, record(2), 9), 1, None)  # type: ignore[arg-type]
    segment.close()
    assert found(path) == []


def test_blocks_that_are_no_whole_pages_are_kept_apart(tmp_path: Path) -> None:
    shape = SegmentShape.fitting(ODD, 200_000)
    assert 0 < shape.n_bytes <= 200_000
    segment = SegmentFile(tmp_path / "s.kv", shape)
    for slot in range(shape.n_slots):
        found_ = SlotEntry(slot, record(slot, ODD.block_bytes), slot)
        segment.write(found_, 1, content(slot, ODD.block_bytes))
    view = memoryview(bytearray(ODD.block_bytes))
    for slot in range(shape.n_slots):
        segment.read(slot, view)
        assert view == content(slot, ODD.block_bytes)
    segment.close()


def test_a_file_too_small_for_one_block_has_no_slots() -> None:
    assert SegmentShape.fitting(SMALL_LAYOUT, 4 * 4096).n_slots == 0
    assert SegmentShape.fitting(SMALL_LAYOUT, 5 * 4096).n_slots == 1


def carry(disk: SegmentFolder, i: int, slot: int, view: memoryview) -> TierOutcome:
    return disk.perform(WriteBack(record(i), 0, slot), view)


def folder(path: Path, mib: int = 1, *, generation: int = 1) -> SegmentFolder:
    """A folder that is open for blocks."""
    disk = SegmentFolder(path, mib << 20, generation=generation)
    disk.open(SMALL_LAYOUT)
    return disk


def test_a_disk_tells_bytes_that_changed_in_memory_or_on_it(tmp_path: Path) -> None:
    disk = folder(tmp_path)
    assert list(disk.blocks()) == []
    view = content(1)
    assert carry(disk, 1, 7, view) == "ok"
    view[100] ^= 1
    assert carry(disk, 1, 8, view) == "corrupt"
    assert disk.perform(Promote(record(1), 7, 0), view) == "ok"
    assert view == content(1)
    assert disk.perform(Promote(record(2), 7, 0), view) == "corrupt"
    assert disk.perform(Erase(7), memoryview(b"")) == "ok"
    disk.close()
    disk = folder(tmp_path, generation=2)
    assert disk.layout() == SMALL_LAYOUT
    assert list(disk.blocks()) == []
    disk.close()


def test_blocks_are_found_in_the_order_of_writes_unless_the_size_differs(tmp_path: Path) -> None:
    disk = folder(tmp_path)
    for slot in (9, 3, 6):
        assert carry(disk, 1, slot, content(1)) == "ok"
    disk.close()
    for mib, slots in ((1, [9, 3, 6]), (2, [])):
        disk = folder(tmp_path, mib, generation=2)
        assert [each.slot for each in disk.blocks()] == slots
        disk.close()


def test_a_folder_is_one_process_own(tmp_path: Path) -> None:
    disk = SegmentFolder(tmp_path, 1 << 20, generation=1)
    with pytest.raises(SegmentFolderInUse, match="give each kvstore its own"):
        SegmentFolder(tmp_path, 1 << 20, generation=2)
    disk.close()
    SegmentFolder(tmp_path, 1 << 20, generation=2).close()


def test_a_folder_that_had_no_room_is_made_whole_once_there_is_some(tmp_path: Path) -> None:
    with no_files_above(1 << 19):
        disk = folder(tmp_path)
        assert (disk.n_slots, disk.grow()) == (0, 0)
    wanted = disk.missing_bytes
    n_slots = disk.grow()
    assert (disk.n_slots, disk.missing_bytes, disk.grow()) == (n_slots, 0, 0)
    assert 0 < n_slots * SMALL_LAYOUT.block_bytes <= wanted
    assert carry(disk, 1, n_slots - 1, content(1)) == "ok"
    disk.close()
    again = folder(tmp_path, generation=2)
    assert [found.record for found in again.blocks()] == [record(1)]
    again.close()


def test_files_that_fail_do_not_hinder_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon_kvstore.disk_tier.segment_folder._SEGMENT_BYTES", 1 << 20)
    in_the_way = tmp_path / "segment-00000.kv"
    in_the_way.mkdir()
    with no_files_above(1 << 19):
        disk = folder(tmp_path, 3)
    n_slots = disk.grow()
    assert n_slots == disk.n_slots > 0
    in_the_way.rmdir()
    assert disk.grow() == n_slots // 2
    disk.close()


def test_no_room_is_taken_in_a_vain_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_files_above(1 << 19):
        disk = folder(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    lacking = usage._replace(free=(1 << 20) - 1)
    monkeypatch.setattr(
        "halfmoon_kvstore.disk_tier.segment_folder.shutil.disk_usage", lambda _: lacking
    )
    assert (disk.grow(), disk.n_slots) == (0, 0)
    disk.close()
