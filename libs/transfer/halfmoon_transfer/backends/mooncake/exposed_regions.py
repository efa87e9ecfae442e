"""Our regions as Mooncake sees them: buffers at absolute addresses, without keys.

An address may be used again: memory that was taken back and registered anew as something else.
Mooncake peers have nothing to tell the two apart by. Our own engines have the *epoch*, a random
number that changes whenever a region is taken back: whoever read our record at an epoch and
finds it still there may use the addresses that the record holds.
"""

import secrets
import threading
from datetime import datetime

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.mooncake import mooncake_records
from halfmoon_transfer.backends.mooncake.mooncake_records import (
    BufferRecord,
    HalfmoonBufferInfo,
    HalfmoonSegmentInfo,
)
from halfmoon_transfer.regions.region_table import (
    AccessRefused,
    AccessStatus,
    RegionEntry,
    RegionTable,
)

_EPOCH_BITS = 64


class ExposedRegions:
    """One segment's regions by address."""

    def __init__(self, regions: RegionTable) -> None:
        self._regions = regions
        self._lock = threading.Lock()
        self.epoch = secrets.randbits(_EPOCH_BITS)

    def next_epoch(self) -> None:
        """A region was taken back: its address means nothing any more, or something else."""
        with self._lock:
            self.epoch = (self.epoch + 1) % 2**_EPOCH_BITS

    def acquire(self, address: int, size: int, *, write: bool) -> tuple[RegionEntry, memoryview]:
        """These bytes, if they lie in one region; the caller gives the entry back.

        Raises:
            Refused: they don't, or it is read-only.
        """
        why = AccessStatus.OUT_OF_BOUNDS
        for entry in self._regions.entries():
            offset = address - entry.address
            if size < 1 or offset < 0 or offset + size > len(entry.view):
                continue
            region = entry.region
            try:
                return self._regions.acquire(
                    region.generation, region.key, offset, size, write=write
                )
            except AccessRefused as refused:
                why = refused.status
        raise AccessRefused(why)

    def give_back(self, entry: RegionEntry) -> None:
        """End an access."""
        self._regions.give_back(entry)

    def address(self, region: Region) -> int:
        """Where one of our regions begins.

        Raises:
            Refused: it is not one of ours, or not in this process's memory.
        """
        found = (each.address for each in self._regions.entries() if each.region == region)
        address = next(found, None)
        if address is None:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        return address

    def record(self, name: str, host: str, port: int) -> mooncake_records.SegmentRecord:
        """All that a peer needs to reach the regions at this data port.

        The epoch is read first: a region that is taken back meanwhile makes the record stale.
        """
        epoch = self.epoch
        buffers = tuple(
            BufferRecord(
                addr=each.address,
                length=len(each.view),
                name=each.location,
                halfmoon=HalfmoonBufferInfo(
                    mooncake_records.hash_key(each.region.key), each.view.readonly
                ),
            )
            for each in self._regions.entries()
        )
        mark = HalfmoonSegmentInfo(self._regions.segment, self._regions.generation, f"{epoch:x}")
        return mooncake_records.SegmentRecord(
            name=name,
            protocol="tcp",
            tcp_data_port=port,
            tcp_data_host=host,
            tcp_proto_version=2,
            timestamp=mooncake_records.format_timestamp(datetime.now()),
            buffers=buffers,
            halfmoon=mark,
        )
