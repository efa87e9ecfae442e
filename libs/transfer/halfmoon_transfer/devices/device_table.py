"""Keep the devices of one engine: opened when their memory is registered, closed with it."""

import logging
import threading
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from halfmoon_protocol.regions import Region
from halfmoon_transfer.devices.device_interface import DeviceError, DeviceMemory
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.devices.local_region import LocalRegion
from halfmoon_transfer.devices.pinned_pool import PinnedPool
from halfmoon_transfer.regions.region_index import RegionEntry
from halfmoon_transfer.regions.region_table import RegionTable
from halfmoon_transfer.settings import TransferSettings

_log = logging.getLogger(__name__)
#: Driver modules by the first part of a location; each is a `DeviceDriver`.
_DRIVERS = {
    "cuda": "halfmoon_transfer.devices.cuda_device",
    "emulated": "halfmoon_transfer.devices.emulated_device",
}


class DeviceDriver(Protocol):
    """The functions of a driver module."""

    #: Open the device at a location; raises `BackendUnavailable` or `DeviceError`.
    open_device: Callable[[str], DeviceMemory]
    #: Return the location of the device that owns an address.
    locate: Callable[[int], str]
    #: Return the location in this process of a device by its identity; None if it is not visible.
    find: Callable[[str], str | None]


class _Opened(NamedTuple):
    device: DeviceMemory
    pool: PinnedPool
    #: The pool's memory: as the driver gave it, and as a private region.
    memory: memoryview
    pinned: Region


class DeviceTable:
    """Devices by location, each with its pinned memory."""

    def __init__(self, regions: RegionTable, settings: TransferSettings) -> None:
        self._regions = regions
        self._pool_bytes = settings.staging_bytes
        self._lock = threading.Lock()
        self._opened: dict[str, _Opened] = {}

    def register(self, span: DeviceSpan, location: str) -> Region:
        """Let peers and our own transfers reach this memory.

        Raises:
            BackendUnavailable: the driver, or its binding, is missing.
            DeviceError: the driver refuses.
        """
        where = self.locate(span)
        opened = self._open(where)
        region = DeviceRegion(span, opened.device, opened.pool)
        return self._regions.register_backed(region, where if location == "*" else location)

    def locate(self, span: DeviceSpan) -> str:
        """Return the location of a span's device; ask the driver where the span names a kind only.

        Raises:
            BackendUnavailable: the driver, or its binding, is missing.
            DeviceError: no device owns it.
        """
        if ":" in span.location:
            return span.location
        return _driver(span.location).locate(span.address)

    def device(self, location: str) -> DeviceMemory:
        """Return the device at a location; open it if it is not open.

        Raises:
            BackendUnavailable: the driver, or its binding, is missing.
            DeviceError: the driver refuses.
        """
        return self._open(location).device

    def find(self, identity: str) -> DeviceMemory | None:
        """Return the device with an identity that a peer named; None if it is not visible here."""
        kind = identity.partition(":")[0]
        if kind not in _DRIVERS:
            return None
        try:
            location = _driver(kind).find(identity)
            return None if location is None else self.device(location)
        except OSError as error:
            _log.info("device %s can't be used: %s", identity, error)
            return None

    @property
    def any_open(self) -> bool:
        """True if any device is open, so that regions may be device memory."""
        return bool(self._opened)

    def local_region(self, entry: RegionEntry) -> LocalRegion:
        """Return where the bytes of a leased region are, on a device or not."""
        region = entry.backing
        if not isinstance(region, DeviceRegion):
            return LocalRegion(entry.view)
        opened = self._opened[region.device.location]
        return LocalRegion(entry.view, region, opened.pool, opened.pinned)

    def _open(self, location: str) -> _Opened:
        with self._lock:
            opened = self._opened.get(location)
            if opened is None:
                opened = self._opened[location] = self._open_device(location)
            return opened

    def _open_device(self, location: str) -> _Opened:
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
        """Free and total bytes of each device's pinned memory, by location."""
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
    if kind not in _DRIVERS:
        raise ValueError(f"no devices of kind {kind!r}; there are {', '.join(sorted(_DRIVERS))}")
    return cast("DeviceDriver", import_module(_DRIVERS[kind]))
