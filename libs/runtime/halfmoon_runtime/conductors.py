"""A worker's conductors: answers to each, and what becomes of requests that nobody waits for.

A conductor is gone when an answer can't reach it, or when it connects anew; the worker then
lets go of what was asked for over the earlier connection.
"""

from collections.abc import Callable

import structlog

from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import Message, Welcome, WorkerInfo
from halfmoon_runtime.network import PeerId, PeerUnreachable, Port
from halfmoon_runtime.owners import Owners

log = structlog.get_logger()


class Conductors:
    """Those of one worker, by its port."""

    def __init__(self, port: Port, let_go: Callable[[RequestId], None]) -> None:
        """Know nobody yet.

        Args:
            port: where they are answered.
            let_go: called for each request that is nobody's any more, after it has left
                `owners`; it must not wait.
        """
        self._port = port
        self._let_go = let_go
        #: Who asked for what; requests are added and dropped by the worker.
        self.owners = Owners()

    async def greet(self, conductor: ConductorId, peer: PeerId, info: WorkerInfo) -> None:
        """A conductor said hello: what it asked for earlier ends, and it learns who we are."""
        for request_id in self.owners.greet(conductor, peer):
            self._let_go(request_id)
        await self.answer(peer, Welcome(worker=info))

    async def introduce(self, info: WorkerInfo) -> None:
        """Tell all of them that the worker is another than it was."""
        for peer in list(self.owners.conductors.values()):
            await self.answer(peer, Welcome(worker=info))

    async def answer(self, peer: PeerId, message: Message) -> None:
        """Send it, or let go of all requests of a connection that is gone."""
        try:
            await self._port.send(peer, message)
        except PeerUnreachable as gone:
            orphans = self.owners.leave(peer)
            if orphans:
                log.warning("conductor_gone", reason=str(gone), n_requests=len(orphans))
            for request_id in orphans:
                self._let_go(request_id)
