"""Segment files that were damaged between two starts: what is whole is found, what is lost is said,
and no block ever has other bytes than were put."""

import errno
import os
import random
import struct
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from structlog.testing import capture_logs

from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.disk_tier.superblock import SegmentShape, read_superblock
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.tiers.disk_map import DiskBlock
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, WriteBack
from halfmoon_testing.block_client import SMALL_LAYOUT
from tests.kvstore.conftest import content, record
from tests.nightly import by_day

N_BYTES = 200_000
SHAPE = SegmentShape.fitting(SMALL_LAYOUT, N_BYTES)
#: Every slot but a few: with more than one page of headers, and empty slots in between.
SLOTS = [slot for slot in range(SHAPE.n_slots) if slot % 9 != 4]
PAGE = 4096
OTHER = msgspec.structs.replace(SMALL_LAYOUT, model="other")
#: The header of version 1 of the format, as it was released.
OLD_HEADER = struct.Struct("<4sIQQQQBB6x32s32s8xQ")


def file_in(folder: Path, index: int = 0) -> Path:
    return folder / f"segment-{index:05}.kv"


def make(folder: Path, layout: KvLayout = SMALL_LAYOUT, n_bytes: int = N_BYTES) -> bytes:
    """A folder with block i in slot i, for each of `SLOTS`; the bytes of its file."""
    disk = SegmentFolder(folder, n_bytes, generation=1)
    disk.open(layout)
    assert list(disk.blocks()) == []
    for slot in SLOTS:
        view = content(slot)
        assert disk.perform(WriteBack(record(slot), 0, slot), view) == "ok"
    disk.close()
    return file_in(folder).read_bytes()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder has several files, as large as the ones here."""
    monkeypatch.setattr("halfmoon_kvstore.disk_tier.segment_folder._SEGMENT_BYTES", N_BYTES)


def old_segment(shape: SegmentShape, layout: KvLayout = SMALL_LAYOUT) -> bytes:
    """The file that version 1 of the format had of the same blocks."""
    text = msgspec.json.encode(SegmentShape(layout, shape.n_slots))
    page = (struct.pack("<8sI", b"HMKVSEG1", len(text)) + text).ljust(PAGE - 8, b"\0")
    file = bytearray(page + summed(page)).ljust(shape.bytes_with(1), b"\0")
    for slot in SLOTS:
        this = record(slot)
        header = OLD_HEADER.pack(
            b"BLK1", this.depth, slot + 1, SMALL_LAYOUT.block_bytes, this.checksum, 1,
            16, 16 if this.parent else 0, this.hash, this.parent or b"", 0,
        )[:-8]  # fmt: skip
        file[PAGE + slot * 128 : PAGE + (slot + 1) * 128] = header + summed(header)
        start = shape.offset(slot)
        file[start : start + SMALL_LAYOUT.block_bytes] = content(slot)
    return bytes(file)


def summed(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


@dataclass
class Restarted:
    """What the next start found."""

    #: Blocks whose bytes are those that were put, by slot.
    whole: set[int]
    #: Blocks that were found and turned out to be damaged when they were read.
    damaged: set[int]
    #: What was logged: each with `event`.
    said: list[MutableMapping[str, Any]]

    def lost(self) -> int:
        """Blocks that the log says are lost."""
        n_read = len([each for each in self.said if each["event"] == "disk_block_damaged"])
        return n_read + sum(int(entry.get("n_blocks_lost", 0)) for entry in self.said)


def restart(folder: Path, n_bytes: int = N_BYTES) -> Restarted:
    """Start on this folder as a node does, and read all that it says it has."""
    found = Restarted(set(), set(), [])
    with capture_logs() as found.said:
        disk = SegmentFolder(folder, n_bytes, generation=2)
        try:
            if (layout := disk.layout()) is None:
                disk.open(SMALL_LAYOUT)  # as the first put does
                assert list(disk.blocks()) == []
                return found
            disk.open(layout)
            for each in list(disk.blocks()):
                read(disk, each, found)
        finally:
            disk.close()
    return found


def restart_on(folder: Path, file: bytes) -> Restarted:
    """Start on a folder with this file."""
    file_in(folder).write_bytes(file)
    return restart(folder)


def replaced(file: bytes, at: int, new: bytes) -> bytes:
    return file[:at] + new + file[at + len(new) :]


def read(disk: SegmentFolder, each: DiskBlock, found: Restarted) -> None:
    i = int.from_bytes(each.record.hash, "big")
    assert each.record == record(i), "a record that was never written"
    view = memoryview(bytearray(SMALL_LAYOUT.block_bytes))
    if disk.perform(Promote(each.record, each.slot, 0), view) == "ok":
        assert view == content(i), "wrong bytes were served"
        found.whole.add(i)
    else:
        found.damaged.add(i)


def payload_of(at: int) -> int | None:
    """The slot whose block has this byte of the file, if one has."""
    slot, within = divmod(at - SHAPE.offset(0), SHAPE.slot_bytes)
    inside = 0 <= slot < SHAPE.n_slots and within < SMALL_LAYOUT.block_bytes
    return slot if inside and slot in SLOTS else None


def places(dice: random.Random) -> list[int]:
    """Return bytes of every part of a file, and any others."""
    every = by_day(16, at_night=1)
    first, second = SHAPE.superblock_offsets
    near = [0, 7, 8, 11, 12, 13, 60, 200, 2000, PAGE - 9, PAGE - 8, PAGE - 1]
    found = [front + at for front in (first, second) for at in near]
    for slot in (0, 1, 4, 31, 32, SHAPE.n_slots - 1):
        for header in SHAPE.header_offsets(slot):
            found += range(header + dice.randrange(every), header + 128, every)
        found += [SHAPE.offset(slot), SHAPE.offset(slot) + PAGE - 1]
    return [*found, *(dice.randrange(SHAPE.n_bytes) for _ in range(by_day(60, at_night=400)))]


@pytest.mark.random_seeds(1)
def test_one_flipped_bit_anywhere_costs_at_most_the_block_that_has_it(
    tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    file = make(tmp_path)
    for at in places(dice):
        flipped = replaced(file, at, bytes([file[at] ^ 1 << dice.randrange(8)]))
        found, hit = restart_on(tmp_path, flipped), payload_of(at)
        expected = {hit} - {None}
        assert found.damaged == expected, f"byte {at}: {found}"
        assert found.whole == set(SLOTS) - expected, f"byte {at}: {found}"
        assert found.lost() == len(expected), f"byte {at}: {found.said}"
        if hit is None:
            assert restart(tmp_path).said == [], f"byte {at} is still damaged"


@pytest.mark.random_seeds(1)
def test_a_page_of_zeros_noise_or_another_pages_bytes_costs_at_most_the_block_that_has_it(
    tmp_path: Path, seed: int
) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    file = make(tmp_path)

    def another(page: int) -> bytes:
        other = dice.randrange(SHAPE.n_bytes // PAGE) * PAGE
        return file[other : other + PAGE]

    fillings: list[Callable[[int], bytes]] = [
        lambda _: bytes(PAGE),
        lambda _: b"\xff" * PAGE,
        lambda _: dice.randbytes(PAGE),
        another,
        another,
    ]
    for page in range(SHAPE.n_bytes // PAGE):
        for filling in dice.sample(fillings, by_day(2, at_night=len(fillings))):
            damaged = replaced(file, page * PAGE, filling(page))
            hit = payload_of(page * PAGE) if damaged != file else None
            found = restart_on(tmp_path, damaged)
            expected = {hit} - {None}
            assert found.damaged == expected, f"page {page}: {found}"
            assert found.whole == set(SLOTS) - expected, f"page {page}: {found}"
            assert found.lost() == len(expected)


def test_a_file_that_was_cut_off_keeps_what_is_before_and_counts_the_rest(tmp_path: Path) -> None:
    file = make(tmp_path)
    # With its first page a file is known; each block is there if its bytes are.
    for size in [*range(SHAPE.offset(0), SHAPE.n_bytes, PAGE), SHAPE.n_bytes - 1]:
        for n_bytes in (size, size + 100):
            found = restart_on(tmp_path, file[:n_bytes])
            kept = {
                slot for slot in SLOTS if SHAPE.offset(slot) + SMALL_LAYOUT.block_bytes <= n_bytes
            }
            assert found.whole == kept and not found.damaged
            assert found.lost() == len(SLOTS) - len(kept)
            if n_bytes < SHAPE.n_bytes:
                [said] = found.said
                assert said["event"] == "disk_segment_mended"
                assert said["n_bytes_missing"] == SHAPE.n_bytes - n_bytes
                assert said["path"] == str(file_in(tmp_path))
            assert file_in(tmp_path).stat().st_size == SHAPE.n_bytes
            assert restart(tmp_path).said == []


def test_a_file_cut_off_in_its_headers_or_emptied_is_used_again(tmp_path: Path) -> None:
    file = make(tmp_path)
    for n_bytes in (0, 1, 100, PAGE - 1, PAGE, PAGE + 64, 2 * PAGE, SHAPE.offset(0) - 1):
        found = restart_on(tmp_path, file[:n_bytes])
        assert not found.whole and not found.damaged
        [said] = found.said
        assert said["event"] == ("disk_segment_lost" if n_bytes < PAGE else "disk_segment_mended")
        make(tmp_path)
        assert restart(tmp_path).whole == set(SLOTS)
    assert restart_on(tmp_path, file + b"something else").whole == set(SLOTS)


def test_a_process_that_ended_between_a_header_and_its_copy_loses_nothing(tmp_path: Path) -> None:
    file = make(tmp_path)
    for slot in SLOTS:
        for header in SHAPE.header_offsets(slot):
            found = restart_on(tmp_path, replaced(file, header, bytes(128)))
            assert found.whole == set(SLOTS)
            assert found.lost() == 0
            assert file_in(tmp_path).read_bytes() == file


def test_an_erased_block_does_not_come_back(tmp_path: Path) -> None:
    make(tmp_path)
    disk = SegmentFolder(tmp_path, N_BYTES, generation=2)
    disk.open(SMALL_LAYOUT)
    for slot in SLOTS[::2]:
        assert disk.perform(Erase(slot), memoryview(b"")) == "ok"
    disk.close()
    file = file_in(tmp_path).read_bytes()
    for page in (*range(1, 1 + SHAPE.headers_bytes // PAGE), -2):
        damaged = replaced(file, page % (SHAPE.n_bytes // PAGE) * PAGE, bytes(PAGE))
        assert restart_on(tmp_path, damaged).whole == set(SLOTS[1::2])


def test_pages_of_headers_that_the_disk_refuses_to_read_are_taken_from_their_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    really = os.preadv
    for bad in {header // PAGE * PAGE for slot in SLOTS for header in SHAPE.header_offsets(slot)}:

        def refuses(fd: int, views: Any, at: int, bad: int = bad) -> int:
            if at < bad + PAGE and bad < at + sum(map(len, views)):
                raise OSError(errno.EIO, "Input/output error")
            return really(fd, views, at)

        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", refuses)
            found = restart(tmp_path)
        assert found.whole == set(SLOTS)
        [said] = found.said
        assert said["n_pages_unreadable"] == 1


# -- files that were written by an earlier release ---------------------------------------------


OLD_SHAPE = SegmentShape.fitting(SMALL_LAYOUT, N_BYTES, n_copies=1)


def test_a_file_of_version_1_is_read_and_gets_its_copies(tmp_path: Path) -> None:
    file = old_segment(OLD_SHAPE)
    assert len(file) <= N_BYTES
    found = restart_on(tmp_path, file)
    assert found.whole == set(SLOTS)
    assert found.said == []
    front = read_superblock(file_in(tmp_path))
    assert front is not None and (front.version, front.shape) == (2, OLD_SHAPE)
    # From now on it stands what any other file does.
    new = file_in(tmp_path).read_bytes()
    for page in range(OLD_SHAPE.offset(0) // PAGE):
        damaged = replaced(new, page * PAGE, bytes(PAGE))
        assert restart_on(tmp_path, damaged).whole == set(SLOTS)


@pytest.mark.random_seeds(1)
def test_a_damaged_byte_of_version_1_costs_at_most_its_block(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    dice = random.Random(seed)
    file = old_segment(OLD_SHAPE)
    fronts = [*range(0, 260, by_day(28, at_night=7)), 1000, PAGE - 9, *range(PAGE - 8, PAGE)]
    headers = [dice.randrange(PAGE, OLD_SHAPE.offset(0)) for _ in range(by_day(50, at_night=200))]
    for at in [*fronts, *headers]:
        damaged = replaced(file, at, bytes([file[at] ^ dice.randrange(1, 256)]))
        found = restart_on(tmp_path, damaged)
        slot = (at - PAGE) // 128
        # Of an empty slot nothing is lost, though this can't be told.
        hit = {slot} if at >= PAGE and slot < OLD_SHAPE.n_slots else set()
        assert found.whole == set(SLOTS) - hit, f"byte {at}"
        assert not found.damaged
        assert found.lost() == len(hit), f"byte {at}: {found.said}"


def test_a_lost_page_of_version_1_is_known_from_other_files(
    tmp_path: Path, small_files: None
) -> None:
    file = old_segment(OLD_SHAPE)
    for zeroed in range(2):
        file_in(tmp_path, zeroed).write_bytes(bytes(PAGE) + file[PAGE:])
        file_in(tmp_path, 1 - zeroed).write_bytes(empty_old_segment())
        assert restart(tmp_path, 2 * N_BYTES).whole == set(SLOTS)


def empty_old_segment() -> bytes:
    file = old_segment(OLD_SHAPE)
    return bytes(file[:PAGE]).ljust(OLD_SHAPE.bytes_with(1), b"\0")


# -- files that are something else -------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (b"something else", "neither its first page nor the copy"),
        (bytes(SHAPE.n_bytes), "neither its first page nor the copy"),
        (None, "its format is HMKVSEG9, which this version can't read"),
    ],
)
def test_what_is_no_segment_is_said_and_written_over(
    tmp_path: Path, what: bytes | None, reason: str
) -> None:
    if what is None:
        front = b"HMKVSEG9".ljust(PAGE - 8, b"\0")
        what = (front + summed(front)).ljust(SHAPE.n_bytes, b"\0")
    file_in(tmp_path).write_bytes(what)
    found = restart(tmp_path)
    [said] = found.said
    assert said["event"] == "disk_segment_lost"
    assert reason in said["reason"]
    make(tmp_path)
    assert restart(tmp_path).whole == set(SLOTS)


def test_a_file_of_another_layout_or_size_costs_no_other(tmp_path: Path, small_files: None) -> None:
    file = make(tmp_path / "whole")
    foreign = make(tmp_path / "foreign", OTHER)
    larger = make(tmp_path / "larger", n_bytes=N_BYTES + 9 * PAGE)
    for strange in (foreign, larger):
        for place in range(3):
            for index in range(3):
                file_in(tmp_path, index).write_bytes(strange if index == place else file)
            found = restart(tmp_path, 3 * N_BYTES)
            assert found.whole == set(SLOTS)
            [said] = found.said
            assert said["event"] == "disk_segment_lost"
            assert said["n_blocks_lost"] == len(SLOTS)
            assert said["path"] == str(file_in(tmp_path, place))


def test_a_file_that_can_not_open_costs_no_other_file(tmp_path: Path, small_files: None) -> None:
    file = make(tmp_path / "whole")
    for place in range(3):
        folder = tmp_path / f"folder-{place}"
        folder.mkdir()
        for index in range(3):
            if index == place:
                file_in(folder, index).mkdir()
            else:
                file_in(folder, index).write_bytes(file)
        found = restart(folder, 3 * N_BYTES)
        assert found.whole == set(SLOTS)
        assert found.said[-1]["event"] == "disk_smaller_than_wanted"
        assert (found.said[-1]["n_segments"], found.said[-1]["wanted"]) == (2, 3)


def test_files_beyond_the_wanted_size_go_and_are_counted(tmp_path: Path, small_files: None) -> None:
    file = make(tmp_path)
    file_in(tmp_path, 1).write_bytes(file)
    found = restart(tmp_path)
    assert found.whole == set(SLOTS)
    [said] = found.said
    assert (said["event"], said["n_blocks_lost"]) == ("disk_segment_lost", len(SLOTS))
    assert not file_in(tmp_path, 1).exists()


def test_a_file_that_can_not_be_read_for_a_moment_is_left_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)

    def no_descriptor(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("halfmoon_kvstore.disk_tier.segment_folder.read_superblock", no_descriptor)
        found = restart(tmp_path)
    assert not found.whole and file_in(tmp_path).read_bytes() == made
    assert "left as it is" in found.said[-1]["reason"]
    assert restart(tmp_path).whole == set(SLOTS)
