"""Copy and export memory of NVIDIA devices through the driver API.

NVIDIA's own binding (`cuda-bindings`, the extra `cuda` of this package) is imported when the first
device is opened. Its calls are the driver's; each returns a status before its results.

All calls use each device's primary context, as torch and other users of the runtime API do. It is
the thread's current context only during our calls. Our streams don't wait for the default stream:
the caller of a transfer has waited for the kernels that write the memory.
"""

import ctypes
import mmap
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from halfmoon_transfer.devices.device_interface import DeviceError, DmaBuf, IpcHandle, NotExportable
from halfmoon_transfer.devices.device_spans import bytes_at
from halfmoon_transfer.interface import BackendUnavailable

KIND = "cuda"
_IPC_HANDLE_BYTES = 64


@cache
def _driver() -> Any:
    """Import the binding and start the driver."""
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendUnavailable(
            f"memory of CUDA devices needs NVIDIA's binding ({error}); install "
            "halfmoon-transfer[cuda]"
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # the types of the binding's errors differ by version
        raise BackendUnavailable(f"NVIDIA's driver can't be loaded here: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendUnavailable(f"NVIDIA's driver does not start: {_words(driver, status)}")
    return driver


def _words(driver: Any, status: Any) -> str:
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return " ".join(part.decode() for part in (name, text) if part) or str(status)


def _call(name: str, *arguments: Any) -> Any:
    """Call the driver; return its result: None, one value, or a tuple.

    Raises:
        DeviceError: its status is not success.
    """
    driver = _driver()
    status, *given = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{name}: {_words(driver, status)}", int(status))
    return given[0] if len(given) == 1 else tuple(given)


def open_device(location: str) -> "CudaDevice":
    """Open the device at "cuda:0" and so on, by this process's numbers.

    Raises:
        BackendUnavailable: the driver or its binding is missing.
        DeviceError: there is no such device.
    """
    return CudaDevice(location)


def locate(address: int) -> str:
    """Return the location of the device that owns an address.

    Raises:
        BackendUnavailable: the driver or its binding is missing.
        DeviceError: no device owns it.
    """
    ordinal = _driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return f"{KIND}:{int(_call('cuPointerGetAttribute', ordinal, address))}"


def find(identity: str) -> str | None:
    """Return the location of a device by its identity; None if this process can't see it."""
    for number in range(int(_call("cuDeviceGetCount"))):
        if _identity(_call("cuDeviceGet", number)) == identity:
            return f"{KIND}:{number}"
    return None


def _identity(device: Any) -> str:
    return f"{KIND}:{bytes(_call('cuDeviceGetUuid', device).bytes).hex()}"


class CudaDevice:
    """One device in its primary context."""

    def __init__(self, location: str) -> None:
        self._driver = _driver()
        self.location = location
        number = location.partition(":")[2]
        if not number.isdecimal():
            raise DeviceError(f"no device {location!r}; the first one is cuda:0")
        self._device = _call("cuDeviceGet", int(number))
        self.identity = _identity(self._device)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        #: By direction, as copies out and in run at the same time.
        self._streams: dict[str, Any] = {}
        #: Opened handles by returned address: the allocation's address, and a count.
        self._opened: dict[int, tuple[Any, int]] = {}
        self._lock = threading.Lock()
        flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        try:
            with self._current():
                for way in ("out", "in", "within"):
                    self._streams[way] = _call("cuStreamCreate", int(flag))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _current(self) -> Generator[None]:
        """Make our context the thread's current one during the block."""
        _call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent")

    def pin(self, n_bytes: int) -> memoryview:
        """Allocate page-locked host memory, for all devices.

        Raises:
            DeviceError: the system has no more.
        """
        with self._current():
            address = int(_call("cuMemHostAlloc", n_bytes, self._driver.CU_MEMHOSTALLOC_PORTABLE))
        return bytes_at(address, n_bytes, owner=None)

    def unpin(self, view: memoryview) -> None:
        """Free memory from `pin`.

        Raises:
            DeviceError: it is not from `pin`.
        """
        with self._current():
            _call("cuMemFreeHost", _address(view))

    def copy_out(self, address: int, view: memoryview) -> "CudaEvent":
        """Begin to fill host memory from device memory.

        Raises:
            DeviceError: the driver refuses, or reports an earlier failure.
        """
        return self._begin("out", view, "cuMemcpyDtoHAsync", _address(view), address, len(view))

    def copy_in(self, view: memoryview, address: int) -> "CudaEvent":
        """Begin to fill device memory from host memory; raises like `copy_out`."""
        return self._begin("in", view, "cuMemcpyHtoDAsync", address, _address(view), len(view))

    def copy_within(self, source: int, destination: int, n_bytes: int) -> "CudaEvent":
        """Begin to copy between addresses of devices; raises like `copy_out`."""
        # The driver finds the devices of both addresses, also if they are two.
        return self._begin("within", None, "cuMemcpyAsync", destination, source, n_bytes)

    def _begin(
        self, direction: str, view: memoryview | None, copy: str, *arguments: int
    ) -> "CudaEvent":
        flags = self._driver.CUevent_flags
        stream = self._streams[direction]
        with self._current():
            # Untimed events are quicker; and a waiting thread sleeps instead of polling.
            event = _call(
                "cuEventCreate",
                int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC),
            )
            try:
                _call(copy, *arguments, stream)
                try:
                    _call("cuEventRecord", event, stream)
                except DeviceError:
                    # The copy has begun, and no event tells its end: wait for the stream.
                    _call("cuStreamSynchronize", stream)
                    raise
            except BaseException:
                _call("cuEventDestroy", event)
                raise
        return CudaEvent(self, event, view)

    def export(self, address: int, n_bytes: int) -> IpcHandle:
        """Return a handle of the whole allocation, with the offset of the range.

        Raises:
            NotExportable: it is memory of another kind: of a memory pool, or mapped in pieces
                (torch's expandable segments).
            DeviceError: the driver refuses.
        """
        attributes = self._driver.CUpointer_attribute
        with self._current():
            capable = _call(
                "cuPointerGetAttribute",
                attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                address,
            )
            base, size = _call("cuMemGetAddressRange", address)
            offset = address - int(base)
            if not capable or offset + n_bytes > int(size):
                raise NotExportable(
                    f"{n_bytes} bytes at {address:#x} of {self.location} are not one allocation "
                    "that CUDA IPC can export"
                )
            try:
                handle = _call("cuIpcGetMemHandle", base)
            except DeviceError as error:
                raise NotExportable(str(error), error.code) from error
        return IpcHandle(ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES), offset)

    def open_handle(self, handle: IpcHandle) -> int:
        """Map another process's allocation; return its address in this process.

        Raises:
            DeviceError: it is no handle, of this process, or of a freed allocation.
        """
        if len(handle.token) != _IPC_HANDLE_BYTES:
            raise DeviceError(f"a CUDA IPC handle has {_IPC_HANDLE_BYTES} bytes")
        raw = self._driver.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle.token, _IPC_HANDLE_BYTES)
        flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with self._lock, self._current():
            # A handle that is opened again gives the same address, and is counted.
            base = _call("cuIpcOpenMemHandle", raw, int(flag))
            address = int(base) + handle.offset
            _, count = self._opened.get(address, (base, 0))
            self._opened[address] = (base, count + 1)
        return address

    def close_handle(self, address: int) -> None:
        """Unmap memory from `open_handle`.

        Raises:
            DeviceError: nothing is open there.
        """
        with self._lock, self._current():
            if address not in self._opened:
                raise DeviceError(f"nothing is open at {address:#x}")
            base, count = self._opened.pop(address)
            if count > 1:
                self._opened[address] = (base, count - 1)
            _call("cuIpcCloseMemHandle", base)

    def dma_buf(self, address: int, n_bytes: int) -> DmaBuf:
        """Return a dma-buf of the pages that hold this range.

        Raises:
            NotExportable: the device, its driver or the kernel has no such thing.
        """
        supported = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        if not _call("cuDeviceGetAttribute", supported, self._device):
            raise NotExportable(
                f"{self.location} gives no dma-buf; it needs the open kernel driver"
            )
        first = address - address % mmap.PAGESIZE
        end = -(-(address + n_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        kind = self._driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        with self._current():
            try:
                fd = _call("cuMemGetHandleForAddressRange", first, end - first, kind, 0)
            except DeviceError as error:
                raise NotExportable(str(error), error.code) from error
        return DmaBuf(int(fd), address - first)

    def close(self) -> None:
        """Unmap all memory, end the streams and release the context.

        Raises:
            DeviceError: the driver refuses; the rest is freed.
        """
        with self._current():
            for base, count in self._opened.values():
                for _ in range(count):
                    _call("cuIpcCloseMemHandle", base)
            self._opened.clear()
            while self._streams:
                _call("cuStreamDestroy", self._streams.popitem()[1])
        _call("cuDevicePrimaryCtxRelease", self._device)


class CudaEvent:
    """The end of one copy."""

    def __init__(self, device: CudaDevice, event: Any, view: memoryview | None) -> None:
        self._device = device
        self._event = event
        #: Keeps the memory alive until the copy has ended.
        self._view = view

    def wait(self) -> None:
        """Block until the copy has ended, without holding the interpreter.

        Raises:
            DeviceError: it failed, or an earlier copy did.
        """
        with self._device._current():
            try:
                _call("cuEventSynchronize", self._event)
            finally:
                _call("cuEventDestroy", self._event)
        self._view = None


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
