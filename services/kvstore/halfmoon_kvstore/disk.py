"""A kvstore's disk: a folder of segment files, as one row of slots.

    PATH/lock                 held by the process that uses the folder
    PATH/segment-00000.kv …   see `segment`

Only this process's bytes are here: what it reads is what it, or an earlier start of it, wrote.
"""

import fcntl
import os
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import structlog
import xxhash

from halfmoon_kvstore.segment import Found, Segment, SegmentShape, read_shape
from halfmoon_protocol.layout import KvLayout
from halfmoon_scheduling.disk_map import OnDisk
from halfmoon_scheduling.tier_commands import Erase, Outcome, Promote, WriteBack
from halfmoon_transfer.region_file import FileShrunk

log = structlog.get_logger()

#: Bytes of a segment file, about, unless the disk or the blocks call for another size.
_SEGMENT_BYTES = 256 * 1024 * 1024


class DiskInUse(Exception):
    """Another process holds the folder: the text names it."""


class Disk:
    """The slots of a folder. `perform` may run in several threads at once."""

    def __init__(self, path: Path, n_bytes: int, generation: int) -> None:
        """Take a folder, made if it is not there; `open` takes it into use.

        Raises:
            DiskInUse: another process has it.
            OSError: it can't be made.
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
            raise DiskInUse(
                f"disk_path {path} is used by another process: give each kvstore its own"
            ) from None
        self._segments: list[Segment] = []
        #: Sequence number of the last write.
        self._sequence = 0
        self._lock = threading.Lock()

    def layout(self) -> KvLayout | None:
        """The layout of the blocks that are here from an earlier start, if there are any."""
        shape = read_shape(self._file(0))
        return None if shape is None else shape.layout

    def open(self, layout: KvLayout) -> None:
        """Take the segments into use: open those of this layout and size, make the others.

        A file system without room for all of them gives room for fewer blocks, which is logged;
        perhaps for none.
        """
        n_segments, shape = _shape(layout, self._n_bytes)
        for stale in sorted(self.path.glob("segment-*.kv"))[n_segments:]:
            stale.unlink()
        for index in range(n_segments):
            try:
                self._segments.append(Segment(self._file(index), shape))
            except OSError as error:
                log.error(
                    "disk_smaller_than_wanted",
                    path=str(self.path), reason=str(error), n_segments=index, wanted=n_segments,
                )  # fmt: skip
                break

    def blocks(self) -> Iterator[OnDisk]:
        """The blocks that are here, by their headers, in the order in which they were written."""
        slots, sequences = array("I"), array("Q")
        for index, segment in enumerate(self._segments):
            for found in segment.blocks():
                slots.append(index * segment.shape.n_slots + found.slot)
                sequences.append(found.sequence)
        self._sequence = max(sequences, default=0)
        # One block at a time: there may be a million.
        for i in sorted(range(len(slots)), key=sequences.__getitem__):
            segment, within = self._locate(slots[i])
            if (block := segment.block(within)) is not None:
                yield OnDisk(block.record, slots[i])

    @property
    def n_slots(self) -> int:
        """Blocks that fit."""
        return sum(segment.shape.n_slots for segment in self._segments)

    @property
    def direct(self) -> bool:
        """Whether all segments go past the page cache."""
        return bool(self._segments) and all(segment.direct for segment in self._segments)

    def looks(self) -> list[dict[str, object]]:
        """Each file: its slots, and the bytes that are in none or rounded up to pages."""
        found: list[dict[str, object]] = []
        for segment in self._segments:
            shape = segment.shape
            lost = shape.n_bytes - shape.n_slots * shape.layout.block_bytes
            found.append(
                {
                    "file": segment.path.name,
                    "bytes": shape.n_bytes,
                    "n_slots": shape.n_slots,
                    "used": segment.n_used,
                    "free": shape.n_slots - segment.n_used,
                    "lost_bytes": lost,
                    "fragmentation": lost / shape.n_bytes,
                    "direct": segment.direct,
                }
            )
        return found

    def perform(self, command: WriteBack | Promote | Erase, view: memoryview) -> Outcome:
        """Move a block between its slot and `view`, its place in memory; or erase a slot.

        Bytes are verified against their checksum in both directions: those that changed in
        memory are not written, those that changed on the disk not served.
        """
        segment, slot = self._locate(command.disk_slot)
        try:
            match command:
                case WriteBack(record=record):
                    if xxhash.xxh3_64_intdigest(view) != record.checksum:
                        return "corrupt"
                    segment.write(Found(slot, record, self._next()), self._generation, view)
                case Promote(record=record):
                    segment.read(slot, view)
                    if xxhash.xxh3_64_intdigest(view) != record.checksum:
                        return "corrupt"
                case Erase():
                    segment.erase(slot)
        except (OSError, FileShrunk) as error:
            log.warning("disk_failed", path=str(segment.path), reason=str(error))
            return "failed"
        return "ok"

    def close(self) -> None:
        """Close all files and let go of the folder."""
        for segment in self._segments:
            segment.close()
        os.close(self._lock_fd)

    def _next(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence

    def _locate(self, slot: int) -> tuple[Segment, int]:
        index, within = divmod(slot, self._segments[0].shape.n_slots)
        return self._segments[index], within

    def _file(self, index: int) -> Path:
        return self.path / f"segment-{index:05}.kv"


def _shape(layout: KvLayout, n_bytes: int) -> tuple[int, SegmentShape]:
    """How many segments of which shape use so many bytes; none if not even one block fits."""
    n_segments = max(1, n_bytes // max(_SEGMENT_BYTES, 16 * layout.block_bytes))
    shape = SegmentShape.fitting(layout, n_bytes // n_segments)
    return (n_segments if shape.n_slots else 0), shape
