"""Find the file behind shared memory, so that other processes of this host can map it too."""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class SharedSpan:
    """Bytes of a file that processes of the same user can open and map."""

    path: str
    #: Offset of the mapping in the file, a multiple of the system's page size.
    offset: int
    #: Offset of the first byte in the mapping.
    skip: int
    n_bytes: int

    def map(self) -> memoryview:
        """Map the bytes, writable.

        Raises:
            OSError: the file is gone with its process, or may not be opened.
        """
        with Path(self.path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), self.skip + self.n_bytes, offset=self.offset)
        return memoryview(mapped)[self.skip :]


def find_shared_span(memory: memoryview) -> SharedSpan:
    """Return where shared memory of this process can be mapped by others.

    Raises:
        ValueError: it is private to this process.
    """
    address = int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, rights, offset, device, inode, *_ = line.split()
            begin, end = (int(edge, 16) for edge in span.split("-"))
            if not begin <= address < end:
                continue
            if "s" not in rights or inode == "0" or address + memory.nbytes > end:
                break
            major, minor = (int(part, 16) for part in device.split(":"))
            path = _descriptor_path(os.makedev(major, minor), int(inode))
            first = int(offset, 16) + address - begin
            skip = first % mmap.ALLOCATIONGRANULARITY
            return SharedSpan(path, first - skip, skip, memory.nbytes)
    raise ValueError(
        "several ranks need memory that processes can share, such as a transfer engine's "
        "`allocate` makes; this memory is private"
    )


def _descriptor_path(device: int, inode: int) -> str:
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found = descriptor.stat()
        except OSError:  # the listing's own
            continue
        if (found.st_dev, found.st_ino) == (device, inode):
            return f"/proc/{os.getpid()}/fd/{descriptor.name}"
    raise ValueError("the shared memory's descriptor is closed: no other process can map it")
