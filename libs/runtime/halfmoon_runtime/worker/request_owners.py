"""Record which connection owns each request, and the conductor's name behind each connection.

A connection owns the requests that it made, and no others: an id alone gives no right to a
request. Requests end with their connection, not with another one of the same name. So two
conductors of one name both work. After a conductor restarts, the requests of its earlier
connection end as soon as that connection is known to be down.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_runtime.channels.network import PeerId


@dataclass
class RequestOwners:
    """Map requests to the connections that own them."""

    #: Conductor's name in each connection's latest hello.
    conductors: dict[PeerId, ConductorId] = field(default_factory=dict)
    _peers: dict[RequestId, PeerId] = field(default_factory=dict)

    def on_hello(self, conductor: ConductorId, peer: PeerId) -> None:
        """Record the name of a connection; a later hello replaces an earlier one."""
        self.conductors[peer] = conductor

    def superseded_peers(self) -> list[PeerId]:
        """Return connections whose name a later connection has taken over."""
        latest = {conductor: peer for peer, conductor in self.conductors.items()}
        return [peer for peer, name in self.conductors.items() if latest[name] != peer]

    def watched_peers(self) -> list[PeerId]:
        """Return connections of conductors that own requests, or whose name was taken over."""
        with_requests = [peer for peer in self._peers.values() if peer in self.conductors]
        return list(dict.fromkeys([*self.superseded_peers(), *with_requests]))

    def add(self, request_id: RequestId, peer: PeerId) -> None:
        """Record that `peer` owns this request."""
        self._peers[request_id] = peer

    def owner_of(self, request_id: RequestId) -> PeerId | None:
        """Return the connection that owns this request, if any."""
        return self._peers.get(request_id)

    def request_ids(self) -> set[RequestId]:
        """Return all requests that have an owner."""
        return set(self._peers)

    def remove(self, request_id: RequestId) -> None:
        """Remove a request that has ended."""
        self._peers.pop(request_id, None)

    def on_peer_lost(self, peer: PeerId) -> list[RequestId]:
        """Remove a connection that is gone, and return the requests that it owned."""
        orphans = [request_id for request_id, owner in self._peers.items() if owner == peer]
        for request_id in orphans:
            del self._peers[request_id]
        self.conductors.pop(peer, None)
        return orphans

    def group_by_owner(self, request_ids: Iterable[RequestId]) -> dict[PeerId, list[RequestId]]:
        """Group requests by owner, in order; leave out requests without an owner."""
        groups: dict[PeerId, list[RequestId]] = {}
        for request_id in request_ids:
            if (peer := self._peers.get(request_id)) is not None:
                groups.setdefault(peer, []).append(request_id)
        return groups
