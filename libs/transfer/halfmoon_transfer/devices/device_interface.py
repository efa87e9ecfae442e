"""Define the contract of a device driver: ordered copies, pinned memory, handles.

Pointers are plain numbers, as drivers give them: nothing here knows a tensor. There are two
drivers: `cuda_device`, and `emulated_device`, whose device memory is host memory that only copies
may access.

Copies are asynchronous. Those out of the device run in the order in which they were begun, and
so do those into it and those within it. The three orders are independent of each other.
"""

import errno
from typing import Protocol

import msgspec


class DeviceError(OSError):
    """A refusal of a device or its driver; the text has the call and the driver's reason."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(errno.EIO, what)
        #: The driver's error number.
        self.code = code

    def __str__(self) -> str:
        return str(self.strerror)


class NotExportable(DeviceError):
    """Memory of a kind that the driver can't export this way."""


class CopyEvent(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Block until the copy has ended; its host memory is not accessed any more.

        Must be called once for each event: it frees the driver's resources.

        Raises:
            DeviceError: it failed.
        """
        ...


class IpcHandle(msgspec.Struct, frozen=True):
    """A handle with which another process of this host opens device memory."""

    #: The driver's own bytes; they name a whole allocation.
    token: bytes
    #: Offset of the exported range in the allocation.
    offset: int


class DmaBuf(msgspec.Struct, frozen=True):
    """Device memory in a form that NICs accept."""

    #: Descriptor, the caller's to close.
    fd: int
    #: Offset of the exported range: the buffer covers whole pages.
    offset: int


class DeviceMemory(Protocol):
    """One device, as one engine uses it. Methods are safe from any thread.

    Its errors are `DeviceError`. The memory of a copy must not change until its event has ended.
    """

    #: As in topologies: "cuda:0".
    location: str
    #: The same in all processes of this host, whatever number they use for the device.
    identity: str

    def pin(self, n_bytes: int) -> memoryview:
        """Allocate host memory for quick copies; `unpin` frees it."""
        ...

    def unpin(self, view: memoryview) -> None:
        """Free memory from `pin`; nothing accesses it any more."""
        ...

    def copy_out(self, address: int, view: memoryview) -> CopyEvent:
        """Begin to fill host memory from device memory."""
        ...

    def copy_in(self, view: memoryview, address: int) -> CopyEvent:
        """Begin to fill device memory from host memory."""
        ...

    def copy_within(self, source: int, destination: int, n_bytes: int) -> CopyEvent:
        """Begin to copy between addresses of this device, or of this one and another."""
        ...

    def export(self, address: int, n_bytes: int) -> IpcHandle:
        """Export this memory, so that other processes of this host can open it.

        Raises:
            NotExportable: it is of a kind that can't be exported.
        """
        ...

    def open_handle(self, handle: IpcHandle) -> int:
        """Open memory that another process exported; return its address in this process."""
        ...

    def close_handle(self, address: int) -> None:
        """Close memory from `open_handle`; no copy accesses it any more."""
        ...

    def dma_buf(self, address: int, n_bytes: int) -> DmaBuf:
        """Return a descriptor with which NICs access this memory without a copy in the host.

        Raises:
            NotExportable: the device, its driver or the kernel has no such thing.
        """
        ...

    def close(self) -> None:
        """Free the driver's resources; all events were waited for."""
        ...
