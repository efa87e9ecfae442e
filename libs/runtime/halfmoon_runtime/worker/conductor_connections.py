"""Answer a worker's conductors, and drop the requests of connections that are gone.

A connection is gone when an answer can't reach it; the worker then drops the requests made over
it. Connections with requests are probed with messages: a prefill worker, which sends nothing for
long, stops soon after its conductor is gone, before other requests get the pages that it writes. A
restarted conductor connects under its old name, and its earlier connection is probed as well.
"""

from collections.abc import Callable, Iterable

import structlog

from halfmoon_protocol.errors import LayoutMismatch
from halfmoon_protocol.ids import ConductorId, RequestId
from halfmoon_protocol.messages import Hello, Message, Welcome, WorkerInfo
from halfmoon_protocol.versions import version_fault, wrong_version
from halfmoon_runtime.channels.network import PeerId, PeerUnreachable, Port
from halfmoon_runtime.worker.request_owners import RequestOwners
from halfmoon_runtime.worker.standstill import StandstillWatch

log = structlog.get_logger()

#: Seconds between two probes of a connection.
_PROBE_S = 1.0
#: Seconds between two probes of all connections: a conductor that left under a name of its own and
#: without requests would be kept for ever, and counted as one that wants this worker.
_PROBE_ALL_S = 15.0
#: Longest text of a peer in the log, in characters.
_MAX_LOGGED = 1000


class RejectedByConductors(LayoutMismatch):
    """All conductors that know this worker refused it; the text is the last reason."""


class ConductorConnections:
    """Track the conductors of one worker, and the requests of each."""

    def __init__(self, port: Port, drop_request: Callable[[RequestId], None]) -> None:
        """Start without connections.

        Args:
            port: sends answers.
            drop_request: called for each request that has lost its owner, after it was removed
                from `owners`; it must not wait.
        """
        self._port = port
        self._drop_request = drop_request
        #: The worker adds and removes requests.
        self.owners = RequestOwners()
        self._looked_s = float("-inf")
        #: None before the first probe.
        self._looked_at_all_s: float | None = None
        self._standstill = StandstillWatch()

    def is_current(self, now: float) -> bool:
        """Return whether conductors that are gone would be known as such; from any thread.

        False after this process stood still, until they have been probed again.
        """
        return self._standstill.is_current(now)

    async def on_hello(self, hello: Hello, peer: PeerId, info: WorkerInfo) -> None:
        """Answer a hello with the worker's record, and probe earlier connections of its name.

        A conductor of other protocol versions is told so, and not served.
        """
        conductor = hello.conductor_id
        if fault := version_fault(conductor, hello.min_version, hello.max_version):
            log.error("conductor_refused", reason=fault)
            await self.answer(peer, wrong_version(hello.max_version))
            return
        if conductor == ConductorId(info.worker_id):  # a start under this name, see `name_check`
            log.warning("name_asked_for", worker_id=conductor)
            await self.answer(peer, Welcome(worker=info))
            return
        known = peer in self.owners.conductors
        self.owners.on_hello(conductor, peer)
        await self.answer(peer, Welcome(worker=info))
        if known:
            return
        await self._try(self.owners.superseded_peers(), info)
        others = [p for p, name in self.owners.conductors.items() if name == conductor]
        if len(others) > 1:
            log.warning("duplicate_conductor_name", conductor=conductor, n_connections=len(others))

    async def broadcast_info(self, info: WorkerInfo) -> None:
        """Send the worker's changed record to all conductors."""
        for peer in list(self.owners.conductors):
            await self.answer(peer, Welcome(worker=info))

    async def probe(self, info: WorkerInfo, now: float) -> None:
        """Probe connections with requests or of names taken over each second, all now and then."""
        if stood_s := self._standstill.begin_round(now):
            log.warning("stood_still", seconds=round(stood_s, 1))
        settled_s = self._standstill.settled_s
        if now >= self._looked_s + _PROBE_S or self._looked_s < settled_s <= now:
            self._looked_s = now
            peers = self.owners.watched_peers()
            if self._looked_at_all_s is None:
                self._looked_at_all_s = now
            elif now >= self._looked_at_all_s + _PROBE_ALL_S:
                self._looked_at_all_s = now
                peers = list(self.owners.conductors)
            await self._try(peers, info)
        self._standstill.end_round(now)

    def on_unwelcome(self, peer: PeerId, reason: str) -> None:
        """Drop the requests of a conductor that refuses this worker.

        From a connection without a hello the message is only logged.

        Raises:
            RejectedByConductors: no other conductor is left.
        """
        greeted = peer in self.owners.conductors
        log.error("refused_by_conductor", reason=reason[:_MAX_LOGGED], greeted=greeted)
        if not greeted:
            return
        self.on_peer_lost(peer)
        if not self.owners.conductors:
            raise RejectedByConductors(reason[:_MAX_LOGGED])

    async def answer(self, peer: PeerId, message: Message) -> None:
        """Send a message, or drop all requests of a connection that is gone.

        Raises:
            MessageTooLarge: nothing was sent.
        """
        try:
            await self._port.send(peer, message)
        except PeerUnreachable as gone:
            if n_requests := self.on_peer_lost(peer):
                log.warning("conductor_gone", reason=str(gone), n_requests=n_requests)

    def on_peer_lost(self, peer: PeerId) -> int:
        """Drop the requests of a connection that is gone, and return how many there were."""
        orphans = self.owners.on_peer_lost(peer)
        for request_id in orphans:
            self._drop_request(request_id)
        return len(orphans)

    async def _try(self, peers: Iterable[PeerId], info: WorkerInfo) -> None:
        for peer in peers:
            await self.answer(peer, Welcome(worker=info))
