"""Who asked for what: the conductor behind each request, and its latest connection.

A conductor that connects anew has forgotten, or is another process of the same name: what its
earlier connection asked for is nobody's any more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_runtime.network import PeerId


@dataclass
class Owners:
    """Requests by the connection that asked for them."""

    #: The latest connection of each conductor.
    conductors: dict[ConductorId, PeerId] = field(default_factory=dict)
    _peers: dict[RequestId, PeerId] = field(default_factory=dict)

    def greet(self, conductor: ConductorId, peer: PeerId) -> list[RequestId]:
        """A conductor said hello; the requests of its earlier connection, now nobody's."""
        earlier = self.conductors.get(conductor)
        self.conductors[conductor] = peer
        return [] if earlier is None else self.leave(earlier)

    def add(self, request_id: RequestId, peer: PeerId) -> None:
        """`peer` asked for this request."""
        self._peers[request_id] = peer

    def of(self, request_id: RequestId) -> PeerId | None:
        """Who asked for it."""
        return self._peers.get(request_id)

    def drop(self, request_id: RequestId) -> None:
        """The request is over."""
        self._peers.pop(request_id, None)

    def leave(self, peer: PeerId) -> list[RequestId]:
        """A connection is gone; its requests, now nobody's."""
        orphans = [request_id for request_id, owner in self._peers.items() if owner == peer]
        for request_id in orphans:
            del self._peers[request_id]
        self.conductors = {c: p for c, p in self.conductors.items() if p != peer}
        return orphans

    def group(self, request_ids: Iterable[RequestId]) -> dict[PeerId, list[RequestId]]:
        """These requests by owner, in order; those without one are left out."""
        groups: dict[PeerId, list[RequestId]] = {}
        for request_id in request_ids:
            if (peer := self._peers.get(request_id)) is not None:
                groups.setdefault(peer, []).append(request_id)
        return groups
