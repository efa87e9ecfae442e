"""The devices that one engine uses: opened when their memory is registered, closed with it."""

import logging
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast, runtime_checkable

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import Backend, CarryRequest
from halfmoon_transfer.devices.device_interface import DeviceError, DeviceMemory
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.devices.pinned_pool import PinnedPool
from halfmoon_transfer.devices.staging import LocalRegion, carry_staged
from halfmoon_transfer.planning.transfer_plan import Batch, SliceOutcome
from halfmoon_transfer.regions.region_table import RegionEntry, RegionTable
from halfmoon_transfer.settings import TransferSettings

_log = logging.getLogger(__name__)
#: Modules by the first part of a location; each has `open_device`, `locate` and `find`.
_KINDS = {
    "cuda": "halfmoon_transfer.devices.cuda_device",
    "emulated": "halfmoon_transfer.devices.emulated_device",
}


class DeviceDriver(Protocol):
    """What the module of a kind of devices has."""

    #: Open the device at a location: `Unavailable` or `DeviceError` if there is none.
    open_device: Callable[[str], DeviceMemory]
    #: The location of the device that an address is of.
    locate: Callable[[int], str]
    #: The location, here, of the device with this identity; None if it is not to be seen.
    find: Callable[[str], str | None]


@runtime_checkable
class SupportsDeviceMemory(Protocol):
    """A backend that reaches device memory by itself, also as the local side."""

    def carry_direct(
        self, errand: CarryRequest, locals_: dict[bytes, LocalRegion]
    ) -> Sequence[SliceOutcome]:
        """Like `Backend.carry`; local bytes are where `locals_` says, by region key."""
        ...


class _Opened(NamedTuple):
    device: DeviceMemory
    pool: PinnedPool
    #: The pool's memory: as the driver gave it, and as a region that nobody is told of.
    memory: memoryview
    pinned: Region


class DeviceTable:
    """Devices by location, each with its pinned memory."""

    def __init__(self, regions: RegionTable, settings: TransferSettings) -> None:
        self._regions = regions
        self._pool_bytes = settings.staging_bytes
        # Two parts of a batch are on their way at once.
        self._part_bytes = max(1, min(settings.staging_part_bytes, settings.staging_bytes // 3))
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}

    def register(self, span: DeviceSpan, location: str) -> Region:
        """Let peers reach this memory, and our own transfers use it.

        Raises:
            Unavailable: the driver, or its binding, is not there.
            DeviceError: the driver says no.
        """
        where = (
            span.location if ":" in span.location else _driver(span.location).locate(span.address)
        )
        opened = self._open(where)
        region = DeviceRegion(span, opened.device, opened.pool)
        return self._regions.register_file(region, where if location == "*" else location)

    def device(self, location: str) -> DeviceMemory:
        """The device at a location, opened if it is not.

        Raises:
            Unavailable: the driver, or its binding, is not there.
            DeviceError: the driver says no.
        """
        return self._open(location).device

    def find(self, identity: str) -> DeviceMemory | None:
        """The device with an identity that another process told; None if we don't see it."""
        kind = identity.partition(":")[0]
        if kind not in _KINDS:
            return None
        try:
            location = _driver(kind).find(identity)
            return None if location is None else self.device(location)
        except OSError as error:
            _log.info("device %s can't be used: %s", identity, error)
            return None

    def concerns(self, batch: Batch) -> bool:
        """Whether any local region of a batch is device memory."""
        return bool(self._opened) and any(
            self._regions.is_stageable(each.local.key) for each in batch.slices
        )

    def carry(self, errand: CarryRequest, backend: Backend) -> Sequence[SliceOutcome]:
        """Carry a batch that concerns us.

        Raises:
            Refused: a local region was unregistered meanwhile.
        """
        regions = {each.local.key: each.local for each in errand.batch.slices}.values()
        with self._regions.lease_entries(regions) as entries:
            locals_ = {entry.region.key: self._local(entry) for entry in entries}
            if isinstance(backend, SupportsDeviceMemory):
                return backend.carry_direct(errand, locals_)
            return carry_staged(errand, locals_, backend.carry, self._part_bytes)

    def _local(self, entry: RegionEntry) -> LocalRegion:
        region = entry.file
        if not isinstance(region, DeviceRegion):
            return LocalRegion(entry.view)
        opened = self._opened[region.device.location]
        return LocalRegion(entry.view, region, opened.pool, opened.pinned)

    def _open(self, location: str) -> _Opened:
        with self._lock:
            opened = self._opened.get(location)
            if opened is None:
                opened = self._opened[location] = self._opened_now(location)
            return opened

    def _opened_now(self, location: str) -> _Opened:
        device = _driver(location.partition(":")[0]).open_device(location)
        try:
            memory = device.pin(self._pool_bytes)
        except BaseException:
            device.close()
            raise
        pinned = self._regions.register_private(memory, location)
        return _Opened(device, PinnedPool(memory), memory, pinned)

    @property
    def free_bytes(self) -> dict[str, tuple[int, int]]:
        """Of each device's pinned memory: what is not lent now, and all of it."""
        return {
            location: (each.pool.free_bytes, each.pool.n_bytes)
            for location, each in self._opened.items()
        }

    def close(self) -> None:
        """Free everything; no transfer is going on and all regions are gone."""
        with self._lock:
            opened, self._opened = self._opened, {}
        for each in opened.values():
            try:
                each.device.unpin(each.memory)
                each.device.close()
            except DeviceError as error:
                _log.warning("%s: closing it: %s", each.device.location, error)


def _driver(kind: str) -> DeviceDriver:
    if kind not in _KINDS:
        raise ValueError(f"no devices of kind {kind!r}; there are {', '.join(sorted(_KINDS))}")
    return cast("DeviceDriver", import_module(_KINDS[kind]))
