"""Use a folder of segment files as one row of slots: a kvstore's disk.

    PATH/lock                 held by the process that uses the folder
    PATH/segment-00000.kv …   see `segment_file`

Only this node writes here: a process reads its own blocks and those of its earlier starts.
"""

import fcntl
import os
import shutil
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog
import xxhash

from halfmoon_kvstore.admin_reports import FileReport
from halfmoon_kvstore.disk_tier.segment_file import SegmentFile, SegmentRepair, scan_blocks
from halfmoon_kvstore.disk_tier.slot_header import SlotEntry
from halfmoon_kvstore.disk_tier.superblock import (
    SegmentShape,
    SegmentSuperblock,
    read_superblock,
    why_unreadable,
)
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_scheduling.tiers.disk_map import DiskBlock
from halfmoon_scheduling.tiers.tier_commands import Erase, Promote, TierOutcome, WriteBack
from halfmoon_transfer.regions.file_region import FileShrunk

log = structlog.get_logger()

#: Approximate bytes of a segment file; a small disk or large blocks lead to another size.
_SEGMENT_BYTES = 256 * 1024 * 1024
_MIB = 1024 * 1024


class SegmentFolderInUse(Exception):
    """Another process uses the folder; the text names the process."""


class SegmentFolder:
    """Read, write and erase the slots of a folder. Threads may call `perform` at once."""

    def __init__(self, path: Path, n_bytes: int, generation: int) -> None:
        """Lock a folder, and make it if it is absent; `open` opens its files.

        Raises:
            SegmentFolderInUse: another process uses it.
            OSError: the folder can't be made.
        """
        self.path = path
        self._n_bytes = n_bytes
        self._generation = generation
        path.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise SegmentFolderInUse(
                f"disk_path {path} is used by another process: give each kvstore its own"
            ) from None
        self._segments: list[SegmentFile] = []
        #: Number of each segment's first slot.
        self._starts: list[int] = []
        #: Shape of new segments, once the layout is known; and numbers of those that the file
        #: system had no room for.
        self._shape: SegmentShape | None = None
        self._missing: list[int] = []
        #: Sequence number of the last write.
        self._sequence = 0
        self._lock = threading.Lock()

    def layout(self) -> KvLayout | None:
        """Layout of the blocks of an earlier start, if there are any.

        Where files differ, it is the layout with the most slots.
        """
        n_slots: Counter[KvLayout] = Counter()
        for path in self._files():
            if (front := _front(path)) is not None:
                n_slots[front.shape.layout] += front.shape.n_slots
        return max(n_slots, key=n_slots.__getitem__, default=None)

    def open(self, layout: KvLayout) -> None:
        """Open the segments of this layout and size, and make the missing ones.

        Damage in a file is repaired, and lost blocks are logged. A file system that is too full
        for all segments has room for fewer blocks, or none; that is logged, and `grow` tries the
        others again. A file that can't be read now, as without descriptors, is left as it is for
        the next start.
        """
        n_segments, shape, old_shape = _shapes(layout, self._n_bytes)
        for stale in self._files()[n_segments:]:
            _log_lost(stale, "the disk is to have fewer files")
            stale.unlink()
        # An unreadable file among files of this layout counts as one of them.
        of_layout = any(
            front.shape.layout == layout for path in self._files() if (front := _front(path))
        )
        self._shape = shape
        reason = ""
        for index in range(n_segments):
            path = self._file(index)
            try:
                front = read_superblock(path)
            except (FileNotFoundError, IsADirectoryError):
                front = None  # no file yet, or no room for one: made below, or by `grow`
            except OSError as error:
                reason = f"{path.name} is left as it is: {error}"
                continue
            if front is None and of_layout and _size(path) == old_shape.bytes_with(1):
                front = SegmentSuperblock(old_shape, version=1)
            if front is not None and front.shape not in (shape, old_shape):
                _log_lost(path, f"it is of {front.shape}, and {shape} is wanted")
                front = None
            elif front is None and _size(path) is not None:
                _log_lost(path, _why_unreadable(path))
            try:
                self._add(SegmentFile(path, shape if front is None else front.shape, front))
            except OSError as error:
                reason = f"{path.name}: {error}"
                if front is None:
                    self._missing.append(index)
        if reason:
            log.error(
                "disk_smaller_than_wanted",
                path=str(self.path), reason=reason, n_segments=len(self._segments),
                wanted=n_segments,
            )  # fmt: skip

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files that could not be made yet."""
        return 0 if self._shape is None else len(self._missing) * self._shape.n_bytes

    def grow(self) -> int:
        """Make files for which the file system had no room before, as far as it has now.

        Returns:
            The number of slots gained; they follow the present ones.
        """
        n_before = self.n_slots
        for index in list(self._missing):
            assert self._shape is not None, "files are missing of an unknown shape"
            # An attempt takes all room that there is, if only for a moment: others want it, too.
            if shutil.disk_usage(self.path).free < self._shape.n_bytes:
                break
            try:
                self._add(SegmentFile(self._file(index), self._shape))
            except OSError as error:
                log.debug("disk_not_grown", file=self._file(index).name, reason=str(error))
            else:
                self._missing.remove(index)
        if n_gained := self.n_slots - n_before:
            log.info(
                "disk_grown",
                path=str(self.path), n_segments=len(self._segments), n_blocks=self.n_slots,
                missing_mib=self.missing_bytes // _MIB,
            )  # fmt: skip
        return n_gained

    def _add(self, segment: SegmentFile) -> None:
        _log_mended(segment)
        start = self.n_slots
        # Other threads look a segment up by its start.
        self._segments.append(segment)
        self._starts.append(start)

    def blocks(self) -> Iterator[DiskBlock]:
        """Yield the stored blocks by their headers, in the order in which they were written."""
        slots, sequences = array("I"), array("Q")
        for start, segment in zip(self._starts, self._segments, strict=True):
            for slot, sequence in segment.sequences():
                slots.append(start + slot)
                sequences.append(sequence)
        self._sequence = max(sequences, default=0)
        # One block at a time: there may be a million blocks.
        for i in sorted(range(len(slots)), key=sequences.__getitem__):
            segment, within = self._locate(slots[i])
            if (block := segment.block(within)) is not None:
                yield DiskBlock(block.record, slots[i])

    @property
    def n_slots(self) -> int:
        """Number of blocks that fit."""
        return sum(segment.shape.n_slots for segment in self._segments)

    @property
    def direct(self) -> bool:
        """True if all segments bypass the page cache."""
        return bool(self._segments) and all(segment.direct for segment in self._segments)

    def describe(self) -> list[FileReport]:
        """Describe each file: its slots, and the bytes beside slots or lost to page rounding."""
        found = []
        for segment in self._segments:
            shape = segment.shape
            lost = shape.n_bytes - shape.n_slots * shape.layout.block_bytes
            found.append(
                FileReport(
                    file=segment.path.name,
                    bytes=shape.n_bytes,
                    n_slots=shape.n_slots,
                    used=segment.n_used,
                    free=shape.n_slots - segment.n_used,
                    lost_bytes=lost,
                    fragmentation=lost / shape.n_bytes,
                    direct=segment.direct,
                )
            )
        return found

    def perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> TierOutcome:
        """Move a block between its slot and `view`, its place in memory; or erase a slot.

        Bytes are verified against their checksum in both directions. Bytes that changed in memory
        are not written; bytes that changed on the disk are not served.
        """
        segment, slot = self._locate(command.disk_slot)
        try:
            match command:
                case WriteBack(record=record):
                    if xxhash.xxh3_64_intdigest(view) != record.checksum:
                        return "corrupt"
                    segment.write(SlotEntry(slot, record, self._next()), self._generation, view)
                case Promote(record=record):
                    segment.read(slot, view)
                    if xxhash.xxh3_64_intdigest(view) != record.checksum:
                        log.warning(
                            "disk_block_damaged",
                            path=str(segment.path), slot=slot, block=record.hash.hex(),
                        )  # fmt: skip
                        return "corrupt"
                case Erase():
                    segment.erase(slot)
        except (OSError, FileShrunk) as error:
            log.warning("disk_failed", path=str(segment.path), reason=str(error))
            return "failed"
        return "ok"

    def close(self) -> None:
        """Close all files and unlock the folder."""
        for segment in self._segments:
            segment.close()
        os.close(self._lock_fd)

    def _next(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence

    def _locate(self, slot: int) -> tuple[SegmentFile, int]:
        index = bisect_right(self._starts, slot) - 1
        return self._segments[index], slot - self._starts[index]

    def _file(self, index: int) -> Path:
        return self.path / f"segment-{index:05}.kv"

    def _files(self) -> list[Path]:
        """Return the existing segment files, in order."""
        return sorted(self.path.glob("segment-*.kv"))


def _shapes(layout: KvLayout, n_bytes: int) -> tuple[int, SegmentShape, SegmentShape]:
    """Return the number of segments for so many bytes, and their shapes.

    The number is 0 if not one block fits. The shapes are those of a new segment and of one of
    version 1.
    """
    n_segments = max(1, n_bytes // max(_SEGMENT_BYTES, 16 * layout.block_bytes))
    shape = SegmentShape.fitting(layout, n_bytes // n_segments)
    old_shape = SegmentShape.fitting(layout, n_bytes // n_segments, n_copies=1)
    return (n_segments if shape.n_slots else 0), shape, old_shape


def _front(path: Path) -> SegmentSuperblock | None:
    try:
        return read_superblock(path)
    except OSError:
        return None


def _size(path: Path) -> int | None:
    """Return the length of a file in bytes; None if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _why_unreadable(path: Path) -> str:
    try:
        return why_unreadable(path)
    except OSError as error:
        return str(error)


def _log_lost(path: Path, reason: str) -> None:
    """Log that a file's blocks are lost."""
    log.warning(
        "disk_segment_lost", path=str(path), reason=reason, n_blocks_lost=len(scan_blocks(path))
    )


def _log_mended(segment: SegmentFile) -> None:
    """Log the repaired damage of a file, if there was any."""
    mended = segment.repair
    if mended != SegmentRepair():
        say = log.warning if mended != SegmentRepair(n_headers=mended.n_headers) else log.info
        say(
            "disk_segment_mended",
            path=str(segment.path), n_blocks_found=segment.n_used, **msgspec.structs.asdict(mended),
        )  # fmt: skip
