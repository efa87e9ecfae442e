"""Allocate memory that other processes of this host can map."""

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class SharedMemory:
    """Memory that several engines can register, one after another; it outlives each of them.

    The bytes stay until `close`, the engines' regions and all views are gone.
    """

    #: The memfd, ours to close.
    fd: int
    #: Writable; of this process.
    view: memoryview

    @classmethod
    def allocate(cls, n_bytes: int) -> Self:
        """Allocate zeroed memory; raises like `allocate_shared`."""
        return cls(*allocate_shared(n_bytes))

    def close(self) -> None:
        """Close the memfd; call once. Regions and views keep the bytes."""
        os.close(self.fd)


def allocate_shared(n_bytes: int) -> tuple[int, memoryview]:
    """Allocate zeroed memory.

    Returns:
        The memfd, which is the caller's to close, and a writable view of its bytes.

    Raises:
        ValueError: `n_bytes` is less than 1.
        OSError: the system has no more memory or descriptors.
    """
    if n_bytes < 1:
        raise ValueError(f"can't allocate {n_bytes} bytes: at least 1")
    fd = os.memfd_create("halfmoon", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, n_bytes)
        # A peer that maps it must not be killed because we truncated it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd, memoryview(mmap.mmap(fd, n_bytes))
    except BaseException:
        os.close(fd)
        raise
