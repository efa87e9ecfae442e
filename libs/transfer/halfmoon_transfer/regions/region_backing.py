"""What a region is when its bytes are not in this process's memory: a file, a device's memory."""

from contextlib import AbstractContextManager
from typing import Protocol


class RegionBacking(Protocol):
    """Where a region's bytes are. Accesses to it go through room that it lends."""

    #: Bytes.
    length: int
    writable: bool
    #: Whether it may be the local side of a transfer: then `devices.staging` moves its bytes.
    stageable: bool

    def lent(self, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Room for this range of the region, while the block runs; what is in it is not said."""
        ...

    def load(self, offset: int, view: memoryview) -> None:
        """Fill a view from this place of the region.

        Raises:
            FileShrunk: it is a file that ends before.
            OSError: the device says so, or it was closed.
        """
        ...

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region; raises like `load`."""
        ...

    def close(self) -> None:
        """Let go of it once the accesses that are going on have ended."""
        ...
