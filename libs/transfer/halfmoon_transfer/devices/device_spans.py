"""What may be registered, told apart by what it offers and not by its type: no torch here.

DeviceSpan                        a pointer of a device, from wherever
.data_ptr() .nbytes .device       a torch tensor, on the host or on a device, of any dtype
__cuda_array_interface__          CuPy, Numba, JAX and others on NVIDIA devices
__array_interface__, or a buffer  numpy arrays (also of dtypes without buffers), bytes, mmap, …
"""

from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np


class DeviceSpan(msgspec.Struct, frozen=True, eq=False):
    """Contiguous memory of a device."""

    #: "cuda:0"; "cuda": the driver knows which one the pointer is of.
    location: str
    #: What the driver calls it.
    address: int
    #: Bytes.
    length: int
    writable: bool = True
    #: Kept as long as the span is: what the memory belongs to.
    owner: object = None


class CudaArrayLike(Protocol):
    """What CuPy, Numba and others have for arrays on NVIDIA devices."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides and type."""
        ...


@runtime_checkable
class TensorLike(Protocol):
    """What of torch.Tensor is used; its meaning is the same for all dtypes and devices."""

    @property
    def device(self) -> Any:
        """Its kind (`type`) and number (`index`)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        ...

    def data_ptr(self) -> int:
        """Where the first one is."""
        ...

    def is_contiguous(self) -> bool:
        """Whether they follow each other in order."""
        ...


def device_span(buffer: object) -> DeviceSpan | None:
    """Where a buffer lies if that is on a device; None for host memory.

    Raises:
        ValueError: it is not one contiguous run, empty, or on a device of another kind.
    """
    if isinstance(buffer, DeviceSpan):
        return _sound(buffer)
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
        return _sound(DeviceSpan(location, buffer.data_ptr(), buffer.nbytes, owner=buffer))
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is None:
        return None
    item = int(interface["typestr"][2:])
    n_bytes = item * int(np.prod(interface["shape"], dtype=np.int64))
    strides = interface.get("strides")
    packed = _packed(interface["shape"], item)
    _require_contiguous(strides is None or tuple(strides) == packed, n_bytes)
    address, read_only = interface["data"]
    return _sound(DeviceSpan("cuda", int(address), n_bytes, not read_only, buffer))


def host_view(buffer: object) -> memoryview:
    """A buffer in host memory as bytes; they keep it alive.

    Raises:
        ValueError: it is not one contiguous run of bytes.
        TypeError: it is no buffer at all.
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
    """Host memory at an address; its owner is held as long as the view."""
    return memoryview(cast("Any", np.asarray(_Lent(owner, address, n_bytes))))


class _Lent:
    """Makes numpy hold on to whose memory it looks at."""

    def __init__(self, owner: object, address: int, n_bytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _sound(span: DeviceSpan) -> DeviceSpan:
    if span.length < 1 or span.address < 1:
        raise ValueError(f"can't register {span.length} bytes at {span.address:#x} of a device")
    return span


def _packed(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """The strides of an array of this shape without gaps, in bytes."""
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
