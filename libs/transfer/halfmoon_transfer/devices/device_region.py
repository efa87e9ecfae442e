"""Serve device memory as a region, through pinned memory of the host.

It is a `RegionBacking` as a file is, so owners serve it over any wire. A lease lends a buffer,
`load` fills it before it is read, and `store` writes it back before a write is acknowledged.
"""

import errno
import mmap
from collections.abc import Generator
from contextlib import contextmanager

from halfmoon_transfer.devices.device_interface import DeviceError, DeviceMemory, DmaBuf, IpcHandle
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.devices.pinned_pool import PinnedPool
from halfmoon_transfer.regions.access import AccessRefused, AccessStatus


class DeviceRegion:
    """A span of a device's memory that peers may reach."""

    #: It may also be the local side of a transfer, see `backends.device_carry`.
    stageable = True

    def __init__(self, span: DeviceSpan, device: DeviceMemory, pool: PinnedPool) -> None:
        self.length = span.length
        self.writable = span.writable
        self.address = span.address
        self.device = device
        self._pool = pool
        #: Keeps the memory alive; None once closed.
        self._span: DeviceSpan | None = span

    @contextmanager
    def lend_buffer(self, offset: int, length: int) -> Generator[memoryview]:
        """Lend a buffer for this range while the block runs; its content is undefined.

        A slow peer holds its buffer for long, so half of the pool is reserved for our own
        transfers. Beyond that the buffer is not pinned: copies are slower, but never wait.
        """
        run = self._pool.take(length, reserve=self._pool.n_bytes // 2)
        if run is None:
            yield memoryview(mmap.mmap(-1, max(1, length)))[:length]
            return
        try:
            yield run.view
        finally:
            self._pool.release(run)

    def load(self, offset: int, view: memoryview) -> None:
        """Fill a view from this place of the region.

        Raises:
            DeviceError: the device failed, or the region was closed.
        """
        span = self._open_span()
        self.device.copy_out(span.address + offset, view).wait()

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region.

        Raises:
            DeviceError: the device failed, or the region was closed.
        """
        span = self._open_span()
        self.device.copy_in(view, span.address + offset).wait()

    def export(self) -> IpcHandle:
        """Return a handle with which another process of this host opens this memory.

        Raises:
            NotExportable: other processes can't open this kind of memory.
            DeviceError: the device failed, or the region was closed.
        """
        return self.device.export(self._open_span().address, self.length)

    def dma_buf(self) -> DmaBuf:
        """Return a descriptor with which a NIC reaches this memory; raises like `export`.

        The descriptor may be closed once it is registered.
        """
        return self.device.dma_buf(self._open_span().address, self.length)

    def _open_span(self) -> DeviceSpan:
        """Return the span, which keeps the memory alive as long as the caller holds it."""
        span = self._span
        if span is None:
            raise DeviceError("the region was closed")
        return span

    def refusal(self, error: Exception) -> AccessRefused:
        """Translate an error of `load` or `store` into the status that peers are told."""
        if isinstance(error, DeviceError):
            return AccessRefused(AccessStatus.DEVICE_FAILED, error.code)
        number = error.errno if isinstance(error, OSError) else None
        return AccessRefused(AccessStatus.FILE_FAILED, number or errno.EIO)

    def close(self) -> None:
        """Release the memory; copies that are going on keep it alive until they end."""
        self._span = None
