"""Emulate a device with host memory: for machines without one, and for tests.

It keeps the contract of a real device. Its memory is accessed by address and by copies only, and
each address is looked up among the allocations. A thread per direction makes the copies later, in
order. Other processes of the same user open its memory by a handle.
"""

import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np

from halfmoon_transfer.devices.device_interface import DeviceError, DmaBuf, IpcHandle, NotExportable
from halfmoon_transfer.devices.device_spans import DeviceSpan
from halfmoon_transfer.regions.byte_ops import copy_bytes

KIND = "emulated"


class EmulatedBuffer:
    """An allocation, which lives as long as it or a span of it is referenced."""

    def __init__(
        self, n_bytes: int, location: str = f"{KIND}:0", *, exportable: bool = True
    ) -> None:
        """Allocate.

        Args:
            n_bytes: size of the allocation.
            location: of the device.
            exportable: whether other processes may open it. Real devices have memory of both kinds.
        """
        fd = os.memfd_create("halfmoon-device", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, n_bytes)
            #: The bytes on the "device", for code that plays its kernels.
            self.view = memoryview(mmap.mmap(fd, n_bytes))
        except BaseException:
            os.close(fd)
            raise
        self.location = location
        self.address = _address(self.view)
        self.token = f"{os.getpid()}/{fd}/{n_bytes}".encode() if exportable else b""
        weakref.finalize(self, os.close, fd)
        with _lock:
            _allocations[self.address] = self

    def span(self, offset: int = 0, length: int | None = None) -> DeviceSpan:
        """Return a range of it, to be registered: `engine.register(buffer.span())`."""
        length = len(self.view) - offset if length is None else length
        return DeviceSpan(self.location, self.address + offset, length, owner=self)


#: Allocations of this process, and open ones of other processes, by address.
_allocations: "weakref.WeakValueDictionary[int, EmulatedBuffer | _Opened]"
_allocations = weakref.WeakValueDictionary()
_lock = threading.Lock()


class EmulatedDevice:
    """An emulated device with a stream per direction."""

    def __init__(self, location: str = f"{KIND}:0") -> None:
        self.location = location
        self.identity = location
        self._streams = {
            direction: _Stream(f"halfmoon-transfer-{location}-{direction}")
            for direction in _DIRECTIONS
        }
        #: Opened allocations of other processes by address, each with a count.
        self._opened: dict[int, tuple[_Opened, int]] = {}
        self._lock = threading.Lock()

    def pin(self, n_bytes: int) -> memoryview:
        """Allocate memory; pinning would not make it quicker."""
        return memoryview(mmap.mmap(-1, n_bytes))

    def unpin(self, view: memoryview) -> None:
        """Do nothing: the memory is freed with its last view."""

    def copy_out(self, address: int, view: memoryview) -> "EmulatedEvent":
        """Begin to fill host memory from device memory.

        Raises:
            DeviceError: it is no memory of a device, or the device is closed.
        """
        device = _find(address, len(view))
        return self._streams["out"].do(lambda: copy_bytes(view, device))

    def copy_in(self, view: memoryview, address: int) -> "EmulatedEvent":
        """Begin to fill device memory from host memory."""
        device = _find(address, len(view))
        return self._streams["in"].do(lambda: copy_bytes(device, view))

    def copy_within(self, source: int, destination: int, n_bytes: int) -> "EmulatedEvent":
        """Begin to copy between addresses of devices."""
        old, new = _find(source, n_bytes), _find(destination, n_bytes)
        return self._streams["within"].do(lambda: copy_bytes(new, old))

    def export(self, address: int, n_bytes: int) -> IpcHandle:
        """Return a handle that names the process and its descriptor.

        Raises:
            NotExportable: the buffer was made with `exportable=False`.
        """
        base, buffer = _allocation(address, n_bytes)
        if not isinstance(buffer, EmulatedBuffer) or not buffer.token:
            raise NotExportable(f"device memory at {address:#x} is not for other processes")
        return IpcHandle(buffer.token, address - base)

    def open_handle(self, handle: IpcHandle) -> int:
        """Map an allocation, once for any number of calls; return its address.

        Raises:
            DeviceError: the allocation is gone, or it is no handle.
        """
        with self._lock:
            found = next((e for e in self._opened.values() if e[0].token == handle.token), None)
            opened = _Opened(handle.token) if found is None else found[0]
            self._opened[opened.address] = (opened, 1 if found is None else found[1] + 1)
            with _lock:
                _allocations[opened.address] = opened
        return opened.address + handle.offset

    def close_handle(self, address: int) -> None:
        """Unmap an allocation when it was closed as often as it was opened."""
        with self._lock:
            for base, (opened, count) in list(self._opened.items()):
                if base <= address < base + len(opened.view):
                    if count > 1:
                        self._opened[base] = (opened, count - 1)
                    else:
                        del self._opened[base]
                    return
        raise DeviceError(f"nothing is open at {address:#x}")

    def dma_buf(self, address: int, n_bytes: int) -> DmaBuf:
        """Refuse: no NIC accepts emulated memory.

        Raises:
            NotExportable: always.
        """
        raise NotExportable(f"{self.location} has no dma-buf")

    @property
    def n_opened(self) -> int:
        """Number of open allocations of other processes."""
        return len(self._opened)

    def close(self) -> None:
        """End the copies that have begun, and the threads."""
        for stream in self._streams.values():
            stream.close()


class EmulatedEvent:
    """The end of one copy."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """End the event; the stream calls this."""
        self._error = error
        self._done.set()

    def wait(self) -> None:
        """Block until the copy has ended.

        Raises:
            DeviceError: it failed.
        """
        self._done.wait()
        if self._error is not None:
            raise DeviceError(f"a copy failed: {self._error}")


_DIRECTIONS = ("out", "in", "within")


class _Stream:
    """A thread that runs jobs in order; started with the first job."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], EmulatedEvent] | None]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def do(self, job: Callable[[], None]) -> EmulatedEvent:
        event = EmulatedEvent()
        with self._lock:
            # A job behind the last one of a closed stream would never end.
            if self._closed:
                raise DeviceError("the device is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._label, daemon=True)
                self._thread.start()
            self._jobs.put((job, event))
        return event

    def _run(self) -> None:
        while (todo := self._jobs.get()) is not None:
            job, event = todo
            try:
                job()
            except Exception as error:
                event.end(error)
            else:
                event.end(None)
            # Their memory must not live until the next job.
            del job, event, todo

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()


class _Opened:
    """Another process's allocation, mapped here."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        try:
            pid, fd, n_bytes = (int(each) for each in token.split(b"/"))
            with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:
                self.view = memoryview(mmap.mmap(file.fileno(), n_bytes))
        except (OSError, ValueError) as error:
            raise DeviceError(f"can't open the memory {token!r:.80}: {error}") from error
        self.address = _address(self.view)


def _allocation(address: int, n_bytes: int) -> "tuple[int, EmulatedBuffer | _Opened]":
    with _lock:
        known = list(_allocations.items())
    for base, each in known:
        if base <= address and address + n_bytes <= base + len(each.view):
            return base, each
    raise DeviceError(f"no device memory of {n_bytes} bytes at {address:#x}")


def _find(address: int, n_bytes: int) -> memoryview:
    base, each = _allocation(address, n_bytes)
    return each.view[address - base : address - base + n_bytes]


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def open_device(location: str) -> EmulatedDevice:
    """Open an emulated device; any number exists."""
    return EmulatedDevice(location)


def locate(address: int) -> str:
    """Return the location of the device that owns an address.

    Raises:
        DeviceError: it is no address of device memory.
    """
    _, each = _allocation(address, 1)
    return each.location if isinstance(each, EmulatedBuffer) else f"{KIND}:0"


def find(identity: str) -> str:
    """Return the location of a device by its identity, which is the same."""
    return identity
