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
from halfmoon_transfer.regions import Refused, RegionTable, Spot, Status

#: What addresses of this process begin with.
_PROCESS = secrets.token_hex(8)
#: All open engines of this process that can be reached so, by address.
_homes: dict[str, Home] = {}
_lock = threading.Lock()


class MemoryBackend:
    """Copies within this process."""

    name = "memory"

    def __init__(self, home: Home) -> None:
        self.slice_bytes = home.settings.copy_slice_bytes
        self._address = f"{_PROCESS}/{secrets.token_hex(8)}"
        with _lock:
            _homes[self._address] = home

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """A random name in this process's directory."""
        return {self.name: Endpoint(self._address)}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer is, or was, an engine of this process."""
        endpoint = peer.endpoints.get("memory")
        return endpoint is not None and endpoint.address.startswith(_PROCESS)

    def at_once(self, peer: SegmentDescriptor, batch: Batch) -> bool:
        """Unless the owner has files: those may keep us waiting."""
        owner = _find(peer)
        return owner is not None and not (
            owner.regions.has_files
            and any(owner.regions.is_file(each.remote.key) for each in batch.slices)
        )

    def carry(self, errand: Errand) -> Sequence[Outcome]:
        """Copy slice by slice."""
        owner = _find(errand.peer)
        outcomes: list[Outcome] = []
        for index, each in enumerate(errand.batch.slices):
            if errand.stop.stopped:
                outcomes.append(Outcome(Fate.LOST, "stopped"))
            elif owner is None:
                outcomes.append(_gone(errand))
            else:
                outcomes.append(_move(errand, index, each, owner.regions))
        return outcomes

    def notify(self, errand: Errand) -> Outcome:
        """Put it into the owner's inbox."""
        batch, owner = errand.batch, _find(errand.peer)
        assert batch.notice is not None
        if owner is None:
            return _gone(errand)
        try:
            owner.inbox.deliver(batch.peer.generation, batch.notice)
        except Refused as refused:
            return refusal(batch, batch.slices[0], refused.status, refused.detail)
        return APPLIED

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """The owner's own bytes."""
        owner = _find(peer)
        return None if owner is None else owner.regions.view(peer.generation, key)

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


def _find(peer: SegmentDescriptor) -> Home | None:
    endpoint = peer.endpoints.get("memory")
    return None if endpoint is None else _homes.get(endpoint.address)


def _gone(errand: Errand) -> Outcome:
    reason = f"segment {errand.peer.name} is not open in this process any more"
    return Outcome(Fate.LOST, reason)


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
            if not regions.has_files:
                return move_here(errand, index, remote)
            # What is leased may lie in a file; then the owner fetches it, or puts it back.
            spots = {index: Spot(each.remote.key, each.remote_offset, remote)}
            failed = regions.load(spots) if batch.op == "read" else {}
            outcome = APPLIED if failed else move_here(errand, index, remote)
            if batch.op == "write" and outcome.fate is Fate.APPLIED:
                failed = regions.store(spots)
            for refused in failed.values():
                raise refused
            return outcome
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
