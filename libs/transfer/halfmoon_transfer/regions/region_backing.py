"""Define the backing of a region whose bytes are not in this process's memory."""

from contextlib import AbstractContextManager
from typing import Protocol

from halfmoon_transfer.regions.access import AccessRefused


class RegionBacking(Protocol):
    """A file, or memory of a device. Accesses go through a buffer that the backing lends."""

    #: Length in bytes.
    length: int
    writable: bool
    #: Whether it may be the local side of a transfer, staged through pinned memory.
    stageable: bool

    def lend_buffer(self, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Lend a buffer for this range while the block runs; its content is undefined."""
        ...

    def load(self, offset: int, view: memoryview) -> None:
        """Fill a view from this place of the region.

        Raises:
            FileShrunk: the file ends before.
            OSError: the file or the device failed, or the backing was closed.
        """
        ...

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region; raises like `load`."""
        ...

    def refusal(self, error: Exception) -> AccessRefused:
        """Translate an error of `load` or `store` into the status that peers are told."""
        ...

    def close(self) -> None:
        """Release the file or the memory once the accesses that are going on have ended."""
        ...
