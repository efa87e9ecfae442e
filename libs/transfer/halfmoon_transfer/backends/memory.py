"""Between engines of one process: a copy, or a view.

Also how an engine reaches its own regions. No wire is crossed, so bytes are compared by
checksum only when that is asked for (`faults` asks).
"""

import secrets
import threading
from collections.abc import Sequence

from halfmoon_transfer.backends.interface import Errand, Gauges, Home, refusal
from halfmoon_transfer.copying import checksum, copy, damage
from halfmoon_transfer.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.plan import APPLIED, Batch, Fate, Outcome, Slice
from halfmoon_transfer.regions import Refused, RegionTable, Status

#: What addresses of this process begin with.
_PROCESS = secrets.token_hex(8)
#: All open engines of this process that can be reached so, by address.
_homes: dict[str, RegionTable] = {}
_lock = threading.Lock()


class MemoryBackend:
    """Copies within this process."""

    name = "memory"

    def __init__(self, home: Home) -> None:
        self.slice_bytes = home.settings.copy_slice_bytes
        self._address = f"{_PROCESS}/{secrets.token_hex(8)}"
        with _lock:
            _homes[self._address] = home.regions

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """A random name in this process's directory."""
        return {self.name: Endpoint(self._address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer is, or was, an engine of this process."""
        endpoint = peer.endpoints.get("memory")
        return endpoint is not None and endpoint.address.startswith(_PROCESS)

    def at_once(self, batch: Batch) -> bool:
        """Always."""
        return True

    def carry(self, errand: Errand) -> Sequence[Outcome]:
        """Copy slice by slice."""
        regions = _find(errand.peer)
        outcomes: list[Outcome] = []
        for index, each in enumerate(errand.batch.slices):
            if errand.stop.stopped:
                outcomes.append(Outcome(Fate.LOST, "stopped"))
            elif regions is None:
                reason = f"segment {errand.peer.name} is not open in this process any more"
                outcomes.append(Outcome(Fate.LOST, reason))
            else:
                outcomes.append(_move(errand, index, each, regions))
        return outcomes

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """The owner's own bytes."""
        regions = _find(peer)
        return None if regions is None else regions.view(peer.generation, key)

    def revoke(self, key: bytes) -> None:
        """Nothing is held."""

    def evict(self, key: bytes) -> None:
        """Nothing is held."""

    def forget(self, segment: str) -> None:
        """Nothing is held."""

    def gauges(self) -> Gauges:
        """Nothing is held."""
        return Gauges()

    def close(self) -> None:
        """Leave the directory."""
        with _lock:
            _homes.pop(self._address, None)


def _find(peer: SegmentDescriptor) -> RegionTable | None:
    endpoint = peer.endpoints.get("memory")
    return None if endpoint is None else _homes.get(endpoint.address)


def _move(errand: Errand, index: int, each: Slice, regions: RegionTable) -> Outcome:
    batch = errand.batch
    try:
        with regions.lease(
            batch.peer.generation,
            each.remote.key,
            each.remote_offset,
            each.length,
            write=batch.op == "write",
        ) as remote:
            return move_here(errand, index, remote)
    except Refused as refused:
        return refusal(batch, each, refused.status, refused.detail)


def move_here(errand: Errand, index: int, remote: memoryview) -> Outcome:
    """Copy one slice between two views of this process, checked if asked for."""
    local = errand.local[index]
    source, destination = (local, remote) if errand.batch.op == "write" else (remote, local)
    if not errand.verify and not errand.damage:
        copy(destination, source)
        return APPLIED
    expected = checksum(source) if errand.verify else None
    copy(destination, source)
    if index in errand.damage:
        damage(destination, errand.damage[index])
    if expected is not None and checksum(destination) != expected:
        each = errand.batch.slices[index]
        return refusal(errand.batch, each, Status.CHECKSUM_MISMATCH, 0)
    return APPLIED
