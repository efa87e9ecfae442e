"""Read and write files and block devices as regions.

A region may be a file, a block device (NVMe, or a namespace of NVMe over Fabrics), or a range of
one. The region table decides whether an access is allowed; this module does the I/O.

Where the file system allows it, whole blocks bypass the page cache (O_DIRECT). The parts at the
edges go through the page cache, and the kernel keeps both in step. So two writers whose ranges
meet inside a block don't undo each other, as a read-modify-write here would. A buffer from
`FileRegion.lend_buffer` is aligned in memory as its range is in the file.

    file    |····[ab|cdefghij|klmnopqr|st]······|        | a block's edge
              cached   direct   direct  cached

A write is done when the kernel has taken it; with `sync`, when the device reports it as durable
(O_DSYNC: like fdatasync after each write).
"""

import errno
import logging
import mmap
import os
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from halfmoon_transfer.regions.access import AccessRefused, AccessStatus
from halfmoon_transfer.regions.byte_ops import copy_bytes

_log = logging.getLogger(__name__)
#: Size and alignment of blocks. Devices with larger ones are accessed through the page cache.
BLOCK_BYTES = 4096
#: Bytes of buffers kept for the next access, per file.
_KEPT_BYTES = 16 * 1024 * 1024


class FileShrunk(Exception):
    """A file that was truncated, so that it ends before its region."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(f"the file has {n_bytes} bytes now")
        self.n_bytes = n_bytes


class FileRegion:
    """A range of an open file. Accesses may run at the same time, also to the same bytes."""

    #: A file is the remote side of transfers only.
    stageable = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        offset: int = 0,
        length: int | None = None,
        writable: bool = True,
        sync: bool = False,
        direct: bool = True,
    ) -> None:
        """Open a file; `TransferEngine.register_file` describes the arguments.

        Raises:
            ValueError: no such range in it, or neither a file nor a block device.
            OSError: it can't be opened.
        """
        self.path = Path(path)
        self.writable = writable
        # Opening a pipe must not wait for its other end.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        if sync:
            flags |= os.O_DSYNC
        self._cached = os.open(self.path, flags)
        #: The same file opened with O_DIRECT; None where that is not possible.
        self._uncached: int | None = None
        #: Whether whole blocks bypass the page cache.
        self.direct = False
        self._lock = threading.Lock()
        #: Accesses that are going on, and 1 until `close`; the last one closes the descriptors.
        self._n_users = 1
        self._kept: list[mmap.mmap] = []
        try:
            self.offset = offset
            self.length = _range_length(self.path, self._cached, offset, length)
            if direct:
                self._uncached = _open_direct(self.path, flags)
                self.direct = self._uncached is not None
        except BaseException:
            os.close(self._cached)
            raise

    @contextmanager
    def lend_buffer(self, offset: int, length: int) -> Generator[memoryview]:
        """Lend a buffer for this range while the block runs; its content is undefined."""
        head = (self.offset + offset) % BLOCK_BYTES
        n_bytes = 1 << (max(head + length, BLOCK_BYTES) - 1).bit_length()
        with self._lock:
            fitting = (i for i, each in enumerate(self._kept) if len(each) == n_bytes)
            index = next(fitting, None)
            buffer = None if index is None else self._kept.pop(index)
        if buffer is None:
            buffer = mmap.mmap(-1, n_bytes)
        yield memoryview(buffer)[head : head + length]
        with self._lock:
            if sum(map(len, self._kept)) + n_bytes <= _KEPT_BYTES:
                self._kept.append(buffer)

    def load(self, offset: int, view: memoryview) -> None:
        """Fill a view from this place of the region.

        Raises:
            FileShrunk: the file ends before.
            OSError: the file system or device failed, or the file was closed.
        """
        self._enter()
        try:
            self._transfer(self.offset + offset, view, write=False)
        finally:
            self._leave()

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region.

        Raises:
            FileShrunk: the file ends before; it is not made longer again.
            OSError: the file system or device failed, or the file was closed.
        """
        self._enter()
        try:
            size = _file_bytes(self._cached)
            if self.offset + offset + len(view) > size:
                raise FileShrunk(size)
            self._transfer(self.offset + offset, view, write=True)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Begin an access, which `_leave` ends."""
        with self._lock:
            if self._n_users == 0:
                raise OSError(errno.EBADF, "the file was closed", str(self.path))
            self._n_users += 1

    def _transfer(self, at: int, view: memoryview, *, write: bool) -> None:
        access = self._write if write else self._read
        head, tail = _block_range(at, len(view))
        direct = self._uncached if self.direct else None
        if direct is None or head >= tail:
            access(self._cached, view, at)
        elif (_address(view) - at) % BLOCK_BYTES:
            # The view is not aligned as the file is.
            with self.lend_buffer(at - self.offset, len(view)) as buffer:
                if write:
                    copy_bytes(buffer, view)
                self._transfer(at, buffer, write=write)
                if not write:
                    copy_bytes(view, buffer)
        else:
            if head:
                access(self._cached, view[:head], at)
            access(direct, view[head:tail], at + head)
            if tail < len(view):
                access(self._cached, view[tail:], at + tail)

    def _read(self, fd: int, view: memoryview, at: int) -> None:
        while view:
            try:
                n_done = os.preadv(fd, [view], at)
            except OSError as error:
                fd = self._without_direct(fd, error)
                continue
            if n_done == 0:
                raise FileShrunk(_file_bytes(self._cached))
            # The rest after a partial read is not aligned any more.
            fd, view, at = self._cached, view[n_done:], at + n_done

    def _write(self, fd: int, view: memoryview, at: int) -> None:
        while view:
            try:
                n_done = os.pwritev(fd, [view], at)
            except OSError as error:
                fd = self._without_direct(fd, error)
                continue
            fd, view, at = self._cached, view[n_done:], at + n_done

    def _without_direct(self, fd: int, error: OSError) -> int:
        """Return the descriptor to go on with: some devices want another alignment."""
        if fd == self._cached or error.errno != errno.EINVAL:
            raise error
        _log.warning("%s: its blocks are not ours, using the page cache", self.path)
        # The descriptor stays open as long as the file: other threads may be using it.
        self.direct = False
        return self._cached

    def refusal(self, error: Exception) -> AccessRefused:
        """Translate an error of `load` or `store` into the status that peers are told."""
        if isinstance(error, FileShrunk):
            return AccessRefused(AccessStatus.FILE_SHRUNK, error.n_bytes)
        number = error.errno if isinstance(error, OSError) else None
        return AccessRefused(AccessStatus.FILE_FAILED, number or errno.EIO)

    def close(self) -> None:
        """Close the file once the accesses that are going on have ended."""
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._n_users -= 1
            if self._n_users > 0:
                return
            self._kept.clear()
        os.close(self._cached)
        if self._uncached is not None:
            os.close(self._uncached)


def _range_length(path: Path, fd: int, offset: int, length: int | None) -> int:
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise ValueError(f"{path} is neither a file nor a block device")
    size = _file_bytes(fd)
    wanted = size - offset if length is None else length
    if offset < 0 or wanted < 1 or offset + wanted > size:
        raise ValueError(
            f"no region of {wanted} bytes at offset {offset} of {path}, which has {size} bytes; "
            "make the file as long as it shall be first"
        )
    return wanted


def _open_direct(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None


def _file_bytes(fd: int) -> int:
    """Return the length of a file, or of a block device (whose status doesn't hold it)."""
    return os.lseek(fd, 0, os.SEEK_END)


def _block_range(at: int, n_bytes: int) -> tuple[int, int]:
    """Return where in a range the whole blocks begin and end."""
    head = -at % BLOCK_BYTES
    tail = n_bytes - (at + n_bytes) % BLOCK_BYTES
    return head, tail


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
