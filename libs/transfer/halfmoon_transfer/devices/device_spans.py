"""Read address and length of buffers, whatever library made them; torch is not imported here.

A buffer is recognised by its attributes, in this order:

    DeviceSpan                        a pointer of a device, of any origin
    .data_ptr() .nbytes .device       a torch tensor, on the host or on a device, of any dtype
    __cuda_array_interface__          CuPy, Numba, JAX and others on NVIDIA devices
    __array_interface__, or a buffer  numpy arrays (also of dtypes without buffers), bytes, mmap, …
"""

from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np


class DeviceSpan(msgspec.Struct, frozen=True, eq=False):
    """Contiguous memory of a device."""

    #: "cuda:0"; or "cuda", and the driver finds the device of the pointer.
    location: str
    #: Pointer of the driver.
    address: int
    #: Length in bytes.
    length: int
    writable: bool = True
    #: Owner of the memory, kept alive as long as the span.
    owner: object = None


class CudaArrayLike(Protocol):
    """An array on an NVIDIA device, of CuPy, Numba and others."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides and type."""
        ...


@runtime_checkable
class TensorLike(Protocol):
    """The used part of torch.Tensor; it means the same for all dtypes and devices."""

    @property
    def device(self) -> Any:
        """The device, with its kind (`type`) and number (`index`)."""
        ...

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        ...

    def is_contiguous(self) -> bool:
        """Return whether the elements follow each other in order."""
        ...


def device_span(buffer: object) -> DeviceSpan | None:
    """Return the span of a buffer on a device; None for host memory.

    Raises:
        ValueError: it is not one contiguous run, empty, or on a device of another kind.
    """
    if isinstance(buffer, DeviceSpan):
        return _checked(buffer)
    if isinstance(buffer, TensorLike):
        kind = str(buffer.device.type)
        if kind == "cpu":
            return None
        if kind != "cuda":
            raise ValueError(
                f"can't register a tensor on {buffer.device}; on cpu or cuda it can be"
            )
        _require_contiguous(buffer.is_contiguous(), buffer.nbytes)
        location = f"cuda:{buffer.device.index}"
        return _checked(DeviceSpan(location, buffer.data_ptr(), buffer.nbytes, owner=buffer))
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return None
    item = int(interface["typestr"][2:])
    n_bytes = item * int(np.prod(interface["shape"], dtype=np.int64))
    strides = interface.get("strides")
    packed = _packed(interface["shape"], item)
    _require_contiguous(strides is None or tuple(strides) == packed, n_bytes)
    address, read_only = interface["data"]
    return _checked(DeviceSpan("cuda", int(address), n_bytes, not read_only, buffer))


def host_view(buffer: object) -> memoryview:
    """Return a buffer in host memory as bytes, which keep it alive.

    Raises:
        ValueError: it is not one contiguous run of bytes.
        TypeError: it is no buffer.
    """
    if isinstance(buffer, TensorLike):
        _require_contiguous(buffer.is_contiguous(), buffer.nbytes)
        return bytes_at(buffer.data_ptr(), buffer.nbytes, buffer)
    if isinstance(buffer, np.ndarray):
        _require_contiguous(buffer.flags.c_contiguous, buffer.nbytes)
        return memoryview(cast("Any", buffer.reshape(-1).view(np.uint8)))
    view = memoryview(cast("Any", buffer))
    _require_contiguous(view.c_contiguous, view.nbytes)
    return view.cast("B")


def bytes_at(address: int, n_bytes: int, owner: object) -> memoryview:
    """Return a view of host memory at an address, which keeps its owner alive."""
    return memoryview(cast("Any", np.asarray(_Lent(owner, address, n_bytes))))


class _Lent:
    """An array interface that makes numpy keep the owner of the memory alive."""

    def __init__(self, owner: object, address: int, n_bytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _checked(span: DeviceSpan) -> DeviceSpan:
    if span.length < 1 or span.address < 1:
        raise ValueError(f"can't register {span.length} bytes at {span.address:#x} of a device")
    return span


def _packed(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Return the strides of an array of this shape without gaps, in bytes."""
    strides: list[int] = []
    step = item
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tuple(strides)


def _require_contiguous(contiguous: bool, n_bytes: int) -> None:
    if not contiguous or n_bytes < 1:
        raise ValueError(
            f"can't register a buffer of {n_bytes} bytes, contiguous: {contiguous}; "
            "it must be contiguous and not empty"
        )
