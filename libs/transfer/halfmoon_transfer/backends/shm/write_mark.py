"""Show an owner of mapped memory whether this process is writing to it.

An owner can't take mapped memory away, so it must know when the last copy into it has ended. A copy
may take for ever: a process can be stopped in the middle of it, as by SIGSTOP. The mark is a page
that both processes have: the writer counts its copies there, and the owner looks.

    writer     counts itself in, then looks whether the owner has cut it off, then copies
    owner      cuts the writer off, then looks at the count

One of both sees the other, so a copy that the owner does not see finds itself cut off. An owner
looks again a moment later: a processor may show a store late.
"""

import fcntl
import mmap
import os
import socket

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: The count is the first byte of the page, this at the most.
_MOST = 255


class WriteMark:
    """The writer's side: one for each connection to an owner."""

    def __init__(self, connection: socket.socket, message: bytes) -> None:
        """Count no copy, and send the owner a descriptor of the page with a message.

        Raises:
            OSError: there is no descriptor, no memory or no owner.
        """
        fd = os.memfd_create("halfmoon-write-mark", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._page = mmap.mmap(fd, mmap.PAGESIZE)
            socket.send_fds(connection, [message], [fd])
        finally:
            os.close(fd)

    def show(self, n_copies: int) -> None:
        """Show how many copies go on; one thread at a time."""
        self._page[0] = min(n_copies, _MOST)


def is_mark(fd: int) -> bool:
    """Return whether a peer's descriptor is memory, so that reading it can't block."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def count_of_copies(fd: int) -> int:
    """Return how many copies a peer counts in its mark; 0 if it has cut the mark short."""
    return sum(os.pread(fd, 1, 0))
