"""Requests by the connection that asked for them, and the names behind connections.

A connection owns what it asked for, and nothing else: an id alone gives no right to a request.
Its requests end with it, not with another connection under the same name. So two conductors of
one name both work; a conductor that was started again gets rid of what its predecessor asked
for as soon as that connection is known to be down.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_runtime.channels.network import PeerId


@dataclass
class RequestOwners:
    """Requests by the connection that asked for them."""

    #: The name that each connection gave in its latest hello.
    conductors: dict[PeerId, ConductorId] = field(default_factory=dict)
    _peers: dict[RequestId, PeerId] = field(default_factory=dict)

    def on_hello(self, conductor: ConductorId, peer: PeerId) -> None:
        """A conductor said hello; said twice on a connection, the later name counts."""
        self.conductors[peer] = conductor

    def superseded_peers(self) -> list[PeerId]:
        """Connections after which another one gave the same name: mostly predecessors."""
        latest = {conductor: peer for peer, conductor in self.conductors.items()}
        return [peer for peer, name in self.conductors.items() if latest[name] != peer]

    def add(self, request_id: RequestId, peer: PeerId) -> None:
        """`peer` asked for this request."""
        self._peers[request_id] = peer

    def owner_of(self, request_id: RequestId) -> PeerId | None:
        """The connection that asked for it."""
        return self._peers.get(request_id)

    def request_ids(self) -> set[RequestId]:
        """The requests that have an owner."""
        return set(self._peers)

    def remove(self, request_id: RequestId) -> None:
        """The request is over."""
        self._peers.pop(request_id, None)

    def on_peer_lost(self, peer: PeerId) -> list[RequestId]:
        """A connection is gone; its requests, now without an owner."""
        orphans = [request_id for request_id, owner in self._peers.items() if owner == peer]
        for request_id in orphans:
            del self._peers[request_id]
        self.conductors.pop(peer, None)
        return orphans

    def group_by_owner(self, request_ids: Iterable[RequestId]) -> dict[PeerId, list[RequestId]]:
        """These requests by owner, in order; those without one are left out."""
        groups: dict[PeerId, list[RequestId]] = {}
        for request_id in request_ids:
            if (peer := self._peers.get(request_id)) is not None:
                groups.setdefault(peer, []).append(request_id)
        return groups
