"""What a device offers to move bytes: copies in order with events, pinned memory, handles.

Pointers are plain numbers, as drivers give them: nothing here knows a tensor. Two drivers speak
this: `cuda`, and `emulated`, whose device memory is host memory that only copies may touch.

Copies are asynchronous. Those out of the device run in the order in which they were begun, and
so do those into it and those within it; the three orders are independent of each other.
"""

import errno
from typing import Protocol

import msgspec


class DeviceError(OSError):
    """A device or its driver refuses something; the text says what and what the driver says."""

    def __init__(self, what: str, code: int = 0) -> None:
        super().__init__(errno.EIO, what)
        #: The driver's number for it.
        self.code = code

    def __str__(self) -> str:
        return str(self.strerror)


class NotExportable(DeviceError):
    """This memory, though good, can't be handed to others this way."""


class CopyEvent(Protocol):
    """The end of one copy."""

    def wait(self) -> None:
        """Block until the copy has ended; the host memory of it is then left alone.

        Must be called once for each event, which frees what the driver holds for it.

        Raises:
            DeviceError: it failed.
        """
        ...


class IpcHandle(msgspec.Struct, frozen=True):
    """What another process opens to reach memory of a device of this host."""

    #: The driver's own bytes; they name a whole allocation.
    token: bytes
    #: Where in the allocation the exported range begins.
    offset: int


class DmaBuf(msgspec.Struct, frozen=True):
    """Memory of a device as network cards are given it."""

    #: The caller's to close.
    fd: int
    #: Where in it the exported range begins: what it covers is whole pages.
    offset: int


class DeviceMemory(Protocol):
    """One device, as one engine uses it. Methods are safe from any thread.

    Its errors are `DeviceError`. A copy's memory must stay as it is until its event was waited for.
    """

    #: As in topologies: "cuda:0".
    location: str
    #: The same for all processes of this host, whatever number they know the device by.
    identity: str

    def pin(self, n_bytes: int) -> memoryview:
        """New host memory that the device copies from and to quickly; `unpin` gives it back."""
        ...

    def unpin(self, view: memoryview) -> None:
        """Free memory from `pin`; nobody touches it any more."""
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
        """Let other processes of this host open this memory.

        Raises:
            NotExportable: it is of a kind that can't be.
        """
        ...

    def open_handle(self, handle: IpcHandle) -> int:
        """The address, here, of memory that another process exported; `close_handle` ends it."""
        ...

    def close_handle(self, address: int) -> None:
        """Let go of what `open_handle` gave; no copy touches it any more."""
        ...

    def dma_buf(self, address: int, n_bytes: int) -> DmaBuf:
        """A file descriptor by which network cards reach this memory without the host's.

        Raises:
            NotExportable: the device, its driver or the kernel has no such thing.
        """
        ...

    def close(self) -> None:
        """Free what the driver holds for us; all events were waited for."""
        ...
