"""Keep device memory of peers open for the next use, the least recently used beyond a bound."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from halfmoon_transfer.backends.cuda.cuda_wire import THIS_PROCESS, CudaRegionGrant
from halfmoon_transfer.devices.device_interface import DeviceError, DeviceMemory
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus

_log = logging.getLogger(__name__)

#: An owner's address, and a region's key.
RegionPlace = tuple[str, bytes]


class OpenedRegion:
    """A peer's region as this process's device sees it."""

    def __init__(self, granted: CudaRegionGrant, device: DeviceMemory) -> None:
        self.device = device
        self.length = granted.length
        self.writable = granted.writable
        #: Whether it is another process's; our own memory is reached without a handle.
        self._foreign = granted.process != THIS_PROCESS
        try:
            self.address = device.open_handle(granted.handle) if self._foreign else granted.address
        except DeviceError as error:
            _log.info("a peer's memory on %s can't be opened: %s", device.location, error)
            raise AccessRefused(AccessStatus.NOT_SHAREABLE) from error
        #: Batches that use it now; once it is `dropped`, the last of them closes it.
        self.n_users = 0
        self.dropped = False

    def close(self) -> None:
        """Close the handle; no copy touches the memory any more."""
        if self._foreign:
            with suppress(DeviceError):
                self.device.close_handle(self.address)


class OpenedRegionTable:
    """Open regions by owner's address and key. Methods are safe from any thread."""

    def __init__(self, max_opened: int) -> None:
        self._max_opened = max_opened
        self._lock = threading.Lock()
        #: The most recently used last.
        self._opened: OrderedDict[RegionPlace, OpenedRegion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._opened)

    def acquire(self, place: RegionPlace, make: Callable[[], OpenedRegion]) -> OpenedRegion:
        """Return a region for one batch, which `release` ends; open it with `make` if need be."""
        with self._lock:
            opened = self._opened.get(place)
            if opened is not None:
                self._opened.move_to_end(place)
                opened.n_users += 1
                return opened
        made = make()
        with self._lock:
            opened = self._opened.setdefault(place, made)
            opened.n_users += 1
            while len(self._opened) > self._max_opened:
                self._drop(next(iter(self._opened)))
        if opened is not made:
            made.close()
        return opened

    def release(self, opened: OpenedRegion) -> None:
        """End a batch's use of a region."""
        with self._lock:
            opened.n_users -= 1
            if opened.dropped and opened.n_users == 0:
                opened.close()

    def drop(self, place: RegionPlace) -> None:
        """Let go of one region."""
        with self._lock:
            if place in self._opened:
                self._drop(place)

    def drop_owner(self, address: str) -> None:
        """Let go of all regions of one owner."""
        with self._lock:
            for place in [place for place in self._opened if place[0] == address]:
                self._drop(place)

    def _drop(self, place: RegionPlace) -> None:
        opened = self._opened.pop(place)
        opened.dropped = True
        if opened.n_users == 0:
            opened.close()
