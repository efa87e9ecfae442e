"""Files and block devices as regions: bytes between a place in a file and memory.

A region may be a file, a block device (NVMe, or a namespace of NVMe over Fabrics), or a range
of one. `regions` decides who may access it, backends lend its bytes a buffer; here is the I/O.

Where the file system takes it, whole blocks go past the page cache (O_DIRECT), and what is
left at the edges goes through it: the kernel keeps both in step, and two writers whose ranges
meet inside a block don't undo each other, as a read-modify-write here would. A buffer from
`FileRegion.lent` lies in memory as its range lies in the file, so that its blocks are aligned.

    file    |····[ab|cdefghij|klmnopqr|st]······|        | a block's edge
              cached   direct   direct  cached

Written means that the kernel has taken it; with `sync`, that the device says it is durable
(O_DSYNC: like fdatasync after each write).
"""

import errno
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from halfmoon_transfer.regions.byte_ops import copy_bytes

_log = logging.getLogger(__name__)
#: What blocks are aligned to. Devices with larger ones are accessed through the page cache.
BLOCK_BYTES = 4096
#: Buffers kept for the next access, per file.
_KEPT_BYTES = 16 * 1024 * 1024
#: Accesses of one request to its files that are in the hands of the system at once.
_DEPTH = 8


class FileShrunk(Exception):
    """The file ends before the region does."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(f"the file has {n_bytes} bytes now")
        self.n_bytes = n_bytes


class FileRegion:
    """A range of an open file. Methods but `close` may run at once, also on the same bytes."""

    #: It is the remote side of transfers only.
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
        """Open it.

        Raises:
            ValueError: no such range in it, or neither a file nor a block device.
            OSError: it can't be opened.
        """
        self.path = Path(path)
        self.writable = writable
        # A pipe must not make us wait for its other end.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        if sync:
            flags |= os.O_DSYNC
        self._cached = os.open(self.path, flags)
        #: The same file past the page cache; None where that is not possible.
        self._uncached: int | None = None
        #: Whether whole blocks go past the page cache.
        self.direct = False
        self._lock = threading.Lock()
        #: Accesses going on: the last one closes what is to be closed.
        self._n_users = 1
        self._kept: list[mmap.mmap] = []
        try:
            self.offset = offset
            self.length = _length_of_range(self.path, self._cached, offset, length)
            if direct:
                self._uncached = _open_direct(self.path, flags)
                self.direct = self._uncached is not None
        except BaseException:
            os.close(self._cached)
            raise

    @contextmanager
    def lent(self, offset: int, length: int) -> Generator[memoryview]:
        """Room for this range of the region, while the block runs; what is in it is not said."""
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
            OSError: the device says so, or the file was closed.
        """
        self._enter()
        try:
            self._move(self.offset + offset, view, write=False)
        finally:
            self._leave()

    def store(self, offset: int, view: memoryview) -> None:
        """Write a view's bytes to this place of the region.

        Raises:
            FileShrunk: the file ends before; it is not made longer again.
            OSError: the device says so, or the file was closed.
        """
        self._enter()
        try:
            size = _size(self._cached)
            if self.offset + offset + len(view) > size:
                raise FileShrunk(size)
            self._move(self.offset + offset, view, write=True)
        finally:
            self._leave()

    def _enter(self) -> None:
        """Begin an access, which `_leave` ends."""
        with self._lock:
            if self._n_users == 0:
                raise OSError(errno.EBADF, "the file was closed", str(self.path))
            self._n_users += 1

    def _move(self, at: int, view: memoryview, *, write: bool) -> None:
        through = self._write if write else self._read
        head, tail = _blocks(at, len(view))
        direct = self._uncached if self.direct else None
        if direct is None or head >= tail:
            through(self._cached, view, at)
        elif (_address(view) - at) % BLOCK_BYTES:
            # Memory that doesn't lie as the file does.
            with self.lent(at - self.offset, len(view)) as room:
                if write:
                    copy_bytes(room, view)
                self._move(at, room, write=write)
                if not write:
                    copy_bytes(view, room)
        else:
            if head:
                through(self._cached, view[:head], at)
            through(direct, view[head:tail], at + head)
            if tail < len(view):
                through(self._cached, view[tail:], at + tail)

    def _read(self, fd: int, view: memoryview, at: int) -> None:
        while view:
            try:
                n_done = os.preadv(fd, [view], at)
            except OSError as error:
                fd = self._without_direct(fd, error)
                continue
            if n_done == 0:
                raise FileShrunk(_size(self._cached))
            # What is left after a part of it is not aligned any more.
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
        """How to go on after an error: some file systems and devices want other alignments."""
        if fd == self._cached or error.errno != errno.EINVAL:
            raise error
        _log.warning("%s: its blocks are not ours, using the page cache", self.path)
        # It stays open as long as the file: others may be using it right now.
        self.direct = False
        return self._cached

    def close(self) -> None:
        """Close it once the accesses that are going on have ended."""
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


class FileThreadPool:
    """A few threads, made when needed: the queue depth of requests that touch files."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, jobs: Mapping[int, Callable[[], None]]) -> dict[int, Exception]:
        """Do all of these and wait; who failed, and how."""
        first = next(iter(jobs), None)
        with self._lock:
            pool = None if self._closed or len(jobs) < 2 else self._started()
            futures = (
                {}
                if pool is None
                else {index: pool.submit(job) for index, job in jobs.items() if index != first}
            )
        failed: dict[int, Exception] = {}
        for index, job in jobs.items():
            try:
                if index in futures:
                    futures[index].result()
                else:
                    job()
            except (FileShrunk, OSError) as error:
                failed[index] = error
        return failed

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_DEPTH, thread_name_prefix=self._label)
        return self._pool

    def close(self) -> None:
        """End the threads; jobs that come later are done by who brings them."""
        with self._lock:
            self._closed = True
            pool = self._pool
        if pool is not None:
            pool.shutdown()


def _length_of_range(path: Path, fd: int, offset: int, length: int | None) -> int:
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):
        raise ValueError(f"{path} is neither a file nor a block device")
    size = _size(fd)
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


def _size(fd: int) -> int:
    """Bytes of a file, or of a block device (whose status doesn't say)."""
    return os.lseek(fd, 0, os.SEEK_END)


def _blocks(at: int, n_bytes: int) -> tuple[int, int]:
    """Where in a range the whole blocks begin and end."""
    head = -at % BLOCK_BYTES
    tail = n_bytes - (at + n_bytes) % BLOCK_BYTES
    return head, tail


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
