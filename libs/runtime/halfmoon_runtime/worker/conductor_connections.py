"""A worker's conductors: answers to each, and what becomes of requests without an owner.

A connection is gone when an answer can't reach it; the worker then lets go of what was asked
for over it. So that this is noticed soon after a conductor was started again, connections
whose name another one has taken over are written to until they are down.
"""

from collections.abc import Callable

import structlog

from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import Message, Welcome, WorkerInfo
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable, Port
from halfmoon_runtime.worker.request_owners import RequestOwners

log = structlog.get_logger()

#: Seconds between two messages to a connection whose name another one has taken over.
_LOOK_S = 1.0
#: Characters of a peer's text that go into the log.
_MAX_LOGGED = 1000


class RejectedByConductors(LayoutMismatch):
    """All conductors that know this worker have refused it; the text is the last one's reason."""


class ConductorConnections:
    """Those of one worker, by its port."""

    def __init__(self, port: Port, let_go: Callable[[RequestId], None]) -> None:
        """Know none yet.

        Args:
            port: where they are answered.
            let_go: called for each request that has lost its owner, after it has left
                `owners`; it must not wait.
        """
        self._port = port
        self._let_go = let_go
        #: Requests are added and dropped by the worker.
        self.owners = RequestOwners()
        self._looked_s = float("-inf")

    async def on_hello(self, conductor: ConductorId, peer: PeerId, info: WorkerInfo) -> None:
        """A conductor said hello: it learns what this worker is, and earlier connections of
        its name are tried."""
        known = peer in self.owners.conductors
        self.owners.on_hello(conductor, peer)
        await self.answer(peer, Welcome(worker=info))
        if known:
            return
        await self._try_namesakes(info)
        others = [p for p, name in self.owners.conductors.items() if name == conductor]
        if len(others) > 1:
            log.warning("conductors_of_one_name", conductor=conductor, n_connections=len(others))

    async def broadcast_info(self, info: WorkerInfo) -> None:
        """Tell all of them that the worker is another than it was."""
        for peer in list(self.owners.conductors):
            await self.answer(peer, Welcome(worker=info))

    async def probe_superseded(self, info: WorkerInfo, now: float) -> None:
        """Every second or so: try the connections whose name another one has taken over."""
        if now >= self._looked_s + _LOOK_S:
            self._looked_s = now
            await self._try_namesakes(info)

    def on_unwelcome(self, peer: PeerId, reason: str) -> None:
        """A conductor will not use this worker: what it asked for ends.

        Raises:
            Unwanted: it was the last one. From a connection that never said hello the message
                is logged and means nothing.
        """
        greeted = peer in self.owners.conductors
        log.error("refused_by_conductor", reason=reason[:_MAX_LOGGED], greeted=greeted)
        if not greeted:
            return
        self.on_peer_lost(peer)
        if not self.owners.conductors:
            raise RejectedByConductors(reason[:_MAX_LOGGED])

    async def answer(self, peer: PeerId, message: Message) -> None:
        """Send it, or let go of all requests of a connection that is gone.

        Raises:
            MessageTooLarge: nothing was sent.
        """
        try:
            await self._port.send(peer, message)
        except PeerUnreachable as gone:
            if n_requests := self.on_peer_lost(peer):
                log.warning("conductor_gone", reason=str(gone), n_requests=n_requests)

    def on_peer_lost(self, peer: PeerId) -> int:
        """A connection is over: let go of its requests; how many there were."""
        orphans = self.owners.on_peer_lost(peer)
        for request_id in orphans:
            self._let_go(request_id)
        return len(orphans)

    async def _try_namesakes(self, info: WorkerInfo) -> None:
        for peer in self.owners.superseded_peers():
            await self.answer(peer, Welcome(worker=info))
