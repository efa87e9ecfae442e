"""Read and write memory of another process through the kernel, where it can't be mapped.

The system calls are process_vm_readv(2) and process_vm_writev(2). They are subject to the attach
check of ptrace(2): the same user, in our process namespace, no `prctl(PR_SET_DUMPABLE, 0)`, and
Yama's `ptrace_scope` 0 (1 allows ancestors only, unless we have CAP_SYS_PTRACE).
"""

import ctypes
import errno
import os
import select
import threading
from collections.abc import Callable

import numpy as np

#: One call moves less than 2 GiB.
_MAX_BYTES = 1024 * 1024 * 1024


class ProcessVmDenied(Exception):
    """A process whose memory the kernel does not let us access."""


class PartialCopy(Exception):
    """A copy that the kernel ended early: not all addresses are mapped."""


class ProcessGone(Exception):
    """A process that has ended."""


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _system_call(name: str) -> Callable[..., int] | None:
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except AttributeError:  # a C library without it
        return None
    span = ctypes.POINTER(_Span)
    found.argtypes = (ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong)
    found.restype = ctypes.c_ssize_t
    return found  # type: ignore[no-any-return]


_readv = _system_call("process_vm_readv")
_writev = _system_call("process_vm_writev")


class RemoteProcess:
    """A process of this host, held by a descriptor, as its number may be used again."""

    def __init__(self, pid: int) -> None:
        """Open the process.

        Args:
            pid: its number in our namespace; 0 for a process outside of it.

        Raises:
            ProcessVmDenied: it is outside of our namespace, or this system lacks the calls.
            ProcessGone: it has ended.
        """
        if pid <= 0 or _readv is None or _writev is None:
            raise ProcessVmDenied("it is in another process namespace, or this system can't")
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise ProcessGone(f"process {pid} has ended") from error
        except OSError as error:
            raise ProcessVmDenied(f"process {pid} can't be held on to: {error}") from error
        self._lock = threading.Lock()
        self._end = select.poll()
        self._end.register(self._fd, select.POLLIN)

    def require_alive(self) -> None:
        """Check that it has not ended; call this before and after each use of its memory.

        Raises:
            ProcessGone: it has ended.
        """
        # A poll object may be used by one thread at a time.
        with self._lock:
            ended = self._end.poll(0)
        if ended:
            raise ProcessGone(f"process {self.pid} has ended")

    def read(self, address: int, into: memoryview) -> None:
        """Fill a view from an address of the process.

        Raises:
            ProcessVmDenied, PartialCopy, ProcessGone: see there.
        """
        self._move(_readv, address, into)

    def write(self, address: int, data: "memoryview | bytes | bytearray") -> None:
        """Copy bytes to an address of the process.

        Raises:
            ProcessVmDenied, PartialCopy, ProcessGone: see there.
        """
        self._move(_writev, address, memoryview(data))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _move(self, call: Callable[..., int] | None, address: int, view: memoryview) -> None:
        assert call is not None
        here = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        for start in range(0, len(view), _MAX_BYTES):
            length = min(_MAX_BYTES, len(view) - start)
            ours, theirs = _Span(here + start, length), _Span(address + start, length)
            n_moved = call(self.pid, ours, 1, theirs, 1, 0)
            if n_moved < 0:
                raise _error_for(self.pid, ctypes.get_errno())
            if n_moved < length:
                raise PartialCopy(
                    f"{start + n_moved} of {len(view)} bytes of process {self.pid} moved"
                )


def _error_for(pid: int, number: int) -> Exception:
    text = f"process {pid}: {os.strerror(number)}"
    if number == errno.ESRCH:
        return ProcessGone(text)
    if number in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return ProcessVmDenied(text)
    return PartialCopy(text)
