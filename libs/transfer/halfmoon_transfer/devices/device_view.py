"""Read a device's memory from the host, slice by slice."""

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.devices.device_interface import DeviceMemory


class DeviceView:
    """Bytes of a device; a slice of it is a copy in memory of the host."""

    def __init__(self, device: DeviceMemory, address: int, length: int, owner: object) -> None:
        """View `length` bytes, whose owner lives as long as the view."""
        self._device = device
        self._address = address
        self._length = length
        self._owner = owner

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> memoryview:
        """Copy a slice without steps.

        Raises:
            DeviceError: the device failed.
        """
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"a slice of a device's memory has no steps, {step} was given")
        copied = memoryview(bytearray(max(0, stop - start)))
        if copied:
            self._device.copy_out(self._address + start, copied).wait()
        return copied


class DeviceBackedMemory(msgspec.Struct, frozen=True):
    """Memory of a device that is registered: its region, and a view that copies."""

    region: Region
    view: DeviceView
