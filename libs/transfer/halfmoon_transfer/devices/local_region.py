"""Describe where the local bytes of a transfer are: in host memory, or on a device."""

from typing import NamedTuple

from halfmoon_protocol.regions import Region
from halfmoon_transfer.devices.device_region import DeviceRegion
from halfmoon_transfer.devices.pinned_pool import PinnedPool


class LocalRegion(NamedTuple):
    """A local region of a batch: host memory, or device memory and its pinned pool."""

    #: The bytes in host memory; empty for device memory.
    view: memoryview
    device: DeviceRegion | None = None
    pool: PinnedPool | None = None
    #: The pool's memory as a region.
    pinned: Region | None = None
