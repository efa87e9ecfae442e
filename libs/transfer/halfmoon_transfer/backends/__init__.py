"""Open backends by name. Each is a class in a module that is imported when it is chosen."""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from halfmoon_transfer.backends.backend_interface import Backend, BackendCapabilities, EngineContext

if TYPE_CHECKING:
    from halfmoon_transfer.backends.fault_injection import FaultInjection

#: Name to "module:class"; the class is called with the `EngineContext`. The conformance suite of
#: `tests/transfer` runs over all of them.
BACKENDS = {
    "cuda": "halfmoon_transfer.backends.cuda.cuda_backend:CudaBackend",
    "memory": "halfmoon_transfer.backends.memory_backend:MemoryBackend",
    "shm": "halfmoon_transfer.backends.shm.shm_backend:ShmBackend",
    "mooncake": "halfmoon_transfer.backends.mooncake.mooncake_backend:MooncakeBackend",
    "rdma": "halfmoon_transfer.backends.rdma.rdma_backend:RdmaBackend",
    "tcp": "halfmoon_transfer.backends.tcp.multi_rail:MultiRailTcp",
}


class BackendClass(Protocol):
    """The class of a backend: its capabilities are known before it is opened."""

    capabilities: BackendCapabilities

    def __call__(self, context: EngineContext, /) -> Backend:
        """Open a backend."""
        ...


def open_backend(choice: "str | FaultInjection", context: EngineContext) -> Backend:
    """Open a backend by name, or one wrapped in fault injection.

    Raises:
        ValueError: no backend of this name, or settings that it can't use.
        BackendUnavailable: a library, driver or device that it needs is missing.
        OSError: it can't listen.
    """
    if not isinstance(choice, str):
        return choice.wrap(open_backend(choice.inner, context))
    return backend_class(choice)(context)


def backend_class(choice: str) -> BackendClass:
    """Import the class of a backend.

    Raises:
        ValueError: no backend of this name.
    """
    if choice not in BACKENDS:
        raise ValueError(f"no backend {choice!r}; there are {', '.join(sorted(BACKENDS))}")
    module, name = BACKENDS[choice].split(":")
    return cast("BackendClass", getattr(import_module(module), name))
