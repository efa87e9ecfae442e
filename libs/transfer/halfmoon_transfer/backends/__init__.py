"""Backends by name. Each is a small class in a module that is imported when it is chosen."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from halfmoon_transfer.backends.backend_interface import Backend, EngineContext

if TYPE_CHECKING:
    from halfmoon_transfer.backends.fault_injection import FaultInjection

#: Name to "module:class"; the class is called with the `EngineContext`.
BACKENDS = {
    "cuda": "halfmoon_transfer.backends.cuda.cuda_backend:CudaBackend",
    "memory": "halfmoon_transfer.backends.memory_backend:MemoryBackend",
    "shm": "halfmoon_transfer.backends.shm.shm_backend:ShmBackend",
    "mooncake": "halfmoon_transfer.backends.mooncake.mooncake_backend:MooncakeBackend",
    "rdma": "halfmoon_transfer.backends.rdma.rdma_backend:RdmaBackend",
    "tcp": "halfmoon_transfer.backends.tcp.multi_rail:MultiRailTcp",
}


def open_backend(choice: "str | FaultInjection", context: EngineContext) -> Backend:
    """Open a backend by name, or one wrapped in faults.

    Raises:
        ValueError: no backend of this name, or settings that it can't use.
        Unavailable: this machine lacks what it needs.
        OSError: it can't listen.
    """
    if not isinstance(choice, str):
        return choice.wrap(open_backend(choice.inner, context))
    if choice not in BACKENDS:
        raise ValueError(f"no backend {choice!r}; there are {', '.join(sorted(BACKENDS))}")
    module, name = BACKENDS[choice].split(":")
    make = cast("Callable[[EngineContext], Backend]", getattr(import_module(module), name))
    return make(context)
