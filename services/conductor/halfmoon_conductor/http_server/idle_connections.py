"""Order the connections of a server that wait for their next request.

Where a server has as many connections as it may, a new one takes the place of an idle one.
"""

from collections.abc import MutableSet
from itertools import islice
from typing import Any, Protocol

#: Idle connections that are looked at for one that has sent all of its last answer.
_LOOKED_AT = 32


class _Transport(Protocol):
    def abort(self) -> None: ...

    def get_write_buffer_size(self) -> int: ...


class IdleConnection(Protocol):
    """A connection that is answered and may be closed."""

    @property
    def transport(self) -> _Transport:
        """The bytes' way to the client."""


class IdleConnections:
    """The idle connections of one server, those that are idle for the longest time first."""

    def __init__(self) -> None:
        #: Until when each is kept, by the loop's clock.
        self._until_s: dict[Any, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, connection: IdleConnection, until_s: float) -> float:
        """Add a connection, and return until when it is kept; as before if it is in already."""
        return self._until_s.setdefault(connection, until_s)

    def discard(self, connection: IdleConnection) -> None:
        """Remove a connection that is not idle any more, or is lost."""
        self._until_s.pop(connection, None)

    def make_room(self, connections: MutableSet[Any]) -> bool:
        """Close one idle connection, and return whether there was one.

        Args:
            connections: all of the server; the closed one is removed at once.
        """
        for connection in list(islice(self._until_s, _LOOKED_AT)):
            until_s = self._until_s.pop(connection)
            if connection.transport.get_write_buffer_size():
                self._until_s[connection] = until_s  # its client still reads: others go first
                continue
            connections.discard(connection)
            connection.transport.abort()
            return True
        return False
