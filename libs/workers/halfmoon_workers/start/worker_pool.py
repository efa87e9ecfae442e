"""Own the memory of a worker's pages, and register it in the transfer engine of each start.

The memory lives as long as the process. Each registration has a new key, so nothing that was
allowed to reach the pool in one start can reach it in the next.
"""

from dataclasses import dataclass

from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_transfer.regions.shared_memory import SharedMemory


@dataclass(frozen=True)
class DevicePool:
    """Memory of a device, which the model owns."""

    buffer: object


@dataclass
class WorkerPool:
    """The memory of a pool: of the host, or of the model's device."""

    _host: SharedMemory | None = None
    _device: DevicePool | None = None

    def allocate(self, n_bytes: int) -> SharedMemory:
        """Allocate zeroed memory of the host.

        Raises:
            OSError: the system has no more.
        """
        self._host = SharedMemory.allocate(n_bytes)
        return self._host

    def keep_device(self, buffer: object) -> DevicePool:
        """Keep memory that the model allocated on its device."""
        self._device = DevicePool(buffer)
        return self._device

    def register(self, transfer: TransferEngine) -> PoolMemory:
        """Register the pool, under a new key.

        Raises:
            BackendUnavailable: the device's driver or binding is missing.
            DeviceError: the driver refuses.
            OSError: the system has no more descriptors.
        """
        if self._device is not None:
            return transfer.register_device(self._device.buffer)  # type: ignore[arg-type]
        assert self._host is not None, "the pool was not allocated"
        return transfer.register_shared(self._host)

    def close(self) -> None:
        """Release the memory; views keep its bytes."""
        if self._host is not None:
            self._host.close()
            self._host = None
