"""Give memory back to the system after many bytes of bodies were freed.

glibc gives back what is free at the heap's end only. One small object there, such as a connection
that was opened meanwhile, keeps all that was freed below it: a gigabyte after a burst of bodies.
`malloc_trim` gives back every free page. Large pieces in mappings of their own (`M_MMAP_THRESHOLD`)
would need no trim, but bodies come in pieces of any size.
"""

import asyncio
import ctypes
from collections.abc import Callable

#: Bytes freed after which memory is given back: what a process may keep for good.
TRIM_BYTES = 32 * 1024 * 1024
#: Seconds until then, in which more is freed. Memory that is used again at once costs page faults.
_DELAY_S = 1.0


def _find_malloc_trim() -> Callable[[int], object] | None:
    """Return the C library's function; None where it has none, as with musl."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
    return trim


class HeapTrimmer:
    """Count freed bytes, and trim the heap after each `TRIM_BYTES` of them."""

    def __init__(self, trim: Callable[[int], object] | None = None) -> None:
        """Make a trimmer that calls `trim`; None: the C library's, where it has one."""
        self._trim = trim or _find_malloc_trim()
        #: Since the last trim began.
        self._n_freed = 0
        self._is_due = False

    def on_freed(self, n_bytes: int) -> None:
        """Count bytes that are free now, or once the caller's frames are gone."""
        self._n_freed += n_bytes
        if self._n_freed < TRIM_BYTES or self._is_due or self._trim is None:
            return
        self._is_due = True
        asyncio.get_running_loop().call_later(_DELAY_S, self._start, self._trim)

    def _start(self, trim: Callable[[int], object]) -> None:
        self._is_due, self._n_freed = False, 0
        # A gigabyte takes a tenth of a second, which is no time for the loop to stand still.
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
