"""Who is at the other end of a Unix socket, as the kernel says: nobody can lie about it."""

import os
import socket
import struct

import msgspec

WITHIN_ONE_USER = "with a cluster key, memory is shared within one user only"
_UCRED = struct.Struct("@iII")


class PeerCredentials(msgspec.Struct, frozen=True):
    """The process at the other end, when it connected or began to listen."""

    #: In our process namespace; 0 when it isn't in there.
    pid: int
    #: In our user namespace.
    user: int

    @classmethod
    def of(cls, sock: socket.socket) -> "PeerCredentials":
        """Who is at the other end of a connected socket.

        Raises:
            OSError: it is not connected any more.
        """
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, user, _ = _UCRED.unpack(found)
        return cls(pid, user)

    @property
    def is_our_user(self) -> bool:
        """Whether it runs as the user that we run as, so may look into our memory anyway."""
        return self.user == os.geteuid()
