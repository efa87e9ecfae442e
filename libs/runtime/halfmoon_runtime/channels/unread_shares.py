"""Bound what each caller of a port has sent and is not read yet.

libzmq holds back no caller (see `zmq_sockets.configure`). One that floods a port loses its own
messages, and the others keep their room.
"""

from halfmoon_runtime.channels.network import PeerId


class UnreadShares:
    """Count the unread messages and bytes of each caller."""

    def __init__(self, most_messages: int, most_bytes: int) -> None:
        """Start with nothing.

        Args:
            most_messages: of one caller.
            most_bytes: of one caller's frames.
        """
        self._most_messages, self._most_bytes = most_messages, most_bytes
        #: Messages and bytes of the callers that have any.
        self._unread: dict[PeerId, tuple[int, int]] = {}

    def fits(self, peer: PeerId, n_bytes: int) -> bool:
        """Return whether a caller's next message is within its share."""
        n_messages, n_before = self._unread.get(peer, (0, 0))
        return n_messages < self._most_messages and n_before + n_bytes <= self._most_bytes

    def add(self, peer: PeerId, n_bytes: int) -> None:
        """Count a message that waits."""
        n_messages, n_before = self._unread.get(peer, (0, 0))
        self._unread[peer] = (n_messages + 1, n_before + n_bytes)

    def remove(self, peer: PeerId, n_bytes: int) -> None:
        """Forget a message that was read."""
        n_messages, n_before = self._unread.pop(peer)
        if n_messages > 1:
            self._unread[peer] = (n_messages - 1, n_before - n_bytes)
