"""Device memory as a region: its bytes pass through pinned memory of the host.

The same contract as `region_file.RegionFile` has, so owners serve it over any wire: a lease
lends room, `load` fills it before it is read, `store` empties it before a write is acknowledged.
"""

import mmap
from collections.abc import Generator
from contextlib import contextmanager

from halfmoon_transfer.devices.device_interface import DeviceError, DeviceMemory, DmaBuf, IpcHandle
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.devices.pinned_pool import PinnedPool


class DeviceRegion:
    """A span of a device that peers may reach."""

    #: It may also be the local side of a transfer, see `staging`.
    stageable = True

    def __init__(self, span: DeviceSpan, device: DeviceMemory, pool: PinnedPool) -> None:
        self.length = span.length
        self.writable = span.writable
        self.address = span.address
        self.device = device
        self._pool = pool
        #: Holds on to the memory; None once closed.
        self._span: DeviceSpan | None = span

    @contextmanager
    def lent(self, offset: int, length: int) -> Generator[memoryview]:
        """Room for this range, while the block runs; what is in it is not said.

        A peer that is slow holds it for long. So half of the pool is left to our own transfers,
        and beyond that it is memory that is not pinned: slower, but nobody waits for anybody.
        """
        run = self._pool.take(length, leaving=self._pool.n_bytes // 2)
        if run is None:
            yield memoryview(mmap.mmap(-1, max(1, length)))[:length]
            return
        try:
            yield run.view
        finally:
            self._pool.give_back(run)

    def load(self, offset: int, view: memoryview) -> None:
        """Fill a view from this place of the region.

        Raises:
            DeviceError: the device says so, or the region was closed.
        """
        span = self._held()
        self.device.copy_out(span.address + offset, view).wait()

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region.

        Raises:
            DeviceError: the device says so, or the region was closed.
        """
        span = self._held()
        self.device.copy_in(view, span.address + offset).wait()

    def export(self) -> IpcHandle:
        """What another process of this host opens to reach this memory itself.

        Raises:
            NotExportable: it can't be opened by others.
            DeviceError: the device says so, or the region was closed.
        """
        return self.device.export(self._held().address, self.length)

    def dma_buf(self) -> DmaBuf:
        """What a network card is given to reach this memory itself; raises like `export`.

        Its descriptor may be closed once it is registered.
        """
        return self.device.dma_buf(self._held().address, self.length)

    def _held(self) -> DeviceSpan:
        """The span, which keeps the memory as long as the caller has it."""
        span = self._span
        if span is None:
            raise DeviceError("the region was closed")
        return span

    def close(self) -> None:
        """Let go of the memory; copies that are going on hold it until they end."""
        self._span = None
