"""Read which process is at the other end of a Unix socket; the kernel vouches for it."""

import os
import socket
import struct

import msgspec

WITHIN_ONE_USER = "with a cluster key, memory is shared within one user only"
_UCRED = struct.Struct("@iII")


class PeerCredentials(msgspec.Struct, frozen=True):
    """The process at the other end, when it connected or began to listen."""

    #: In our process namespace; 0 for a process outside of it.
    pid: int
    #: In our user namespace.
    user: int

    @classmethod
    def of(cls, sock: socket.socket) -> "PeerCredentials":
        """Read the credentials of a connected socket's other end.

        Raises:
            OSError: it is not connected any more.
        """
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, user, _ = _UCRED.unpack(found)
        return cls(pid, user)

    @property
    def is_our_user(self) -> bool:
        """True if it runs as our user, and may read our memory anyway."""
        return self.user == os.geteuid()
