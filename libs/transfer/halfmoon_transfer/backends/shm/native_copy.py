"""Copy a batch in one call of the extension in C, where that is built.

It leaves whatever is unusual to `shm_backend`: slices out of bounds, injected faults, checks. See
`docs/transfer/native.md`.
"""

from collections.abc import Callable

from halfmoon_transfer.backends.backend_interface import CarryRequest

#: See `halfmoon_transfer_native.copy`.
_Copy = Callable[..., bool]


def find_copy() -> _Copy | None:
    """Return the extension's function; None if there is no extension, or an older one."""
    try:
        from halfmoon_transfer_native import copy
    except ImportError:
        return None
    return copy


def copy_batch(copy: _Copy, request: CarryRequest, memory: memoryview) -> bool:
    """Copy the whole batch between local memory and a mapped region.

    Returns:
        False if it is unusual; then nothing was copied.
    """
    write = request.batch.op == "write"
    if request.verify or request.damage or request.stop.stopped or (write and memory.readonly):
        return False
    return copy(write, request.batch.slices, request.local, memory)
