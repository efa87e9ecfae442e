"""Expose our regions as Mooncake expects them: buffers at absolute addresses, without keys.

An address may be reused: memory can be unregistered and registered again as another region.
Mooncake peers can't tell the two apart. Halfmoon engines compare the *epoch*, a random number
that changes whenever a region is unregistered. The addresses of a record are valid while the
epoch of that record is still current.
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
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.regions.region_table import RegionTable

_EPOCH_BITS = 64


class ExposedRegions:
    """The regions of one segment, accessed by address."""

    def __init__(self, regions: RegionTable) -> None:
        self._regions = regions
        self._lock = threading.Lock()
        self.epoch = secrets.randbits(_EPOCH_BITS)

    def next_epoch(self) -> None:
        """Change the epoch after a region was unregistered, since its address is now invalid."""
        with self._lock:
            self.epoch = (self.epoch + 1) % 2**_EPOCH_BITS

    def acquire(self, address: int, size: int, *, write: bool) -> tuple[RegionEntry, memoryview]:
        """Return a range of bytes inside one region; the caller must give the entry back.

        Raises:
            AccessRefused: no region holds the whole range, or the region is read-only.
        """
        why = AccessStatus.OUT_OF_BOUNDS
        for entry in self._regions.index.entries():
            offset = address - entry.address
            if size < 1 or offset < 0 or offset + size > len(entry.view):
                continue
            region = entry.region
            try:
                return self._regions.leases.acquire(
                    region.generation, region.key, offset, size, write=write
                )
            except AccessRefused as refused:
                why = refused.status
        raise AccessRefused(why)

    def give_back(self, entry: RegionEntry) -> None:
        """End an access."""
        self._regions.leases.release(entry)

    def address(self, region: Region) -> int:
        """Return the address at which one of our regions begins.

        Raises:
            AccessRefused: the region is not ours, or not in this process's memory.
        """
        found = (each.address for each in self._regions.index.entries() if each.region == region)
        address = next(found, None)
        if address is None:
            raise AccessRefused(AccessStatus.UNKNOWN_KEY)
        return address

    def record(self, name: str, host: str, port: int) -> mooncake_records.SegmentRecord:
        """Build the segment record, by which peers reach the regions at this data port.

        The epoch is read first: a region that is unregistered meanwhile makes the record stale.
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
            for each in self._regions.index.entries()
        )
        halfmoon = HalfmoonSegmentInfo(
            self._regions.segment, self._regions.generation, f"{epoch:x}"
        )
        return mooncake_records.SegmentRecord(
            name=name,
            protocol="tcp",
            tcp_data_port=port,
            tcp_data_host=host,
            tcp_proto_version=2,
            timestamp=mooncake_records.format_timestamp(datetime.now()),
            buffers=buffers,
            halfmoon=halfmoon,
        )
