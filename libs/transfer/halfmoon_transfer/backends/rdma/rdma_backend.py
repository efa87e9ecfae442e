"""Carry batches over RDMA: the NICs of two hosts move the bytes by themselves.

Links (`link`) are kept and reused, at most as many per peer as batches are carried at once. The
devices check every packet (ICRC), so no checksums are made here.
"""

import threading
import time
from collections.abc import Callable, Sequence

from halfmoon_transfer.backends.addresses import advertised_address, join_address, split_address
from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.rdma import rail_notifications
from halfmoon_transfer.backends.rdma.batch_send import BatchSend
from halfmoon_transfer.backends.rdma.link import LinkRefused, LinkUntrusted, RdmaLink
from halfmoon_transfer.backends.rdma.rail_health import (
    NothingListening,
    RailEndpoints,
    RailFailed,
    RailHealth,
    RdmaPeerGone,
)
from halfmoon_transfer.backends.rdma.rail_state import RailPhase
from halfmoon_transfer.backends.rdma.rdma_device import open_devices
from halfmoon_transfer.backends.rdma.rdma_handshake import MAX_RAILS
from halfmoon_transfer.backends.rdma.rdma_memory import RdmaMemoryTable
from halfmoon_transfer.backends.rdma.rdma_server import RdmaServer
from halfmoon_transfer.backends.rdma.verbs import VerbsError
from halfmoon_transfer.backends.socket_io import connect_any
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, SliceOutcome
from halfmoon_transfer.threads.stop_signal import StopSignal

#: Deadline of repairs, which stop with the backend.
_FOR_EVER_S = 1e9


class RdmaBackend:
    """Both sides of RDMA."""

    name = "rdma"
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=True,
        notifications=True,
        views=False,
        checks_accesses=False,
    )

    def __init__(self, context: EngineContext) -> None:
        """Open the devices and listen for links.

        Raises:
            BackendUnavailable: no pyverbs, or no (such) devices.
            ValueError: an invalid address.
            OSError: it can't listen.
        """
        settings = context.settings
        self.slice_bytes = settings.slice_bytes
        self._connect_timeout_s = settings.connect_timeout_s
        self._key = settings.cluster_key
        self._max_idle = settings.max_idle_connections
        self._devices = open_devices(settings.rdma_devices[:MAX_RAILS])
        self._memory = RdmaMemoryTable(context.regions, self._devices)
        label = f"halfmoon-transfer-{context.name}-rdma"
        try:
            self._server = RdmaServer(
                context.regions,
                self._memory,
                self._devices,
                context.notification_queue,
                bind=context.bind,
                port=settings.rdma_port,
                label=label,
                max_connections=settings.max_connections,
                stall_timeout_s=settings.stall_timeout_s,
                key=settings.cluster_key,
            )
        except BaseException:
            self._close_devices()
            raise
        try:
            self._endpoint = _side_channel(context, self._server.port)
        except ValueError:
            self._server.close()
            self._close_devices()
            raise
        self._repairs = StopSignal.after(_FOR_EVER_S)
        self._health = RailHealth(f"{label}-repair", self._try_rail)
        self._lock = threading.Lock()
        #: Idle links; the oldest first.
        self._idle: list[RdmaLink] = []
        self._n_busy = 0

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoint of the side channel."""
        return {self.name: self._endpoint}

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer has RDMA devices too."""
        return self.name in peer.endpoints

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch over the rails of one link."""

        def move(link: RdmaLink, outcomes: list[SliceOutcome | None]) -> str:
            sending = BatchSend(link, request, self._memory, outcomes)
            sending.run()
            return sending.missing

        return self._use_link(request, move)

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver the notification over a rail of one link."""

        def deliver(link: RdmaLink, outcomes: list[SliceOutcome | None]) -> str:
            outcomes[0] = rail_notifications.deliver_notification(link, request)
            return ""

        return self._use_link(request, deliver)[0]

    def _use_link(
        self, request: CarryRequest, use: Callable[[RdmaLink, list[SliceOutcome | None]], str]
    ) -> Sequence[SliceOutcome]:
        """Take a link, use it, and keep it if it is good.

        `use` returns the reason for slices without an outcome.
        """
        where = _where(request.peer)
        try:
            link = self._take(request.peer, request.stop)
        except LinkUntrusted as untrusted:
            return same_outcome_for_all(
                request.batch, OutcomeKind.UNTRUSTED, f"{where}: {untrusted}"
            )
        except LinkRefused as turned:
            stale = turned.own.generation != request.peer.generation
            fate = OutcomeKind.STALE if stale else OutcomeKind.LOST
            return same_outcome_for_all(request.batch, fate, f"{where}: {turned}")
        except (RdmaPeerGone, VerbsError) as error:
            fate = (
                OutcomeKind.UNREACHABLE if isinstance(error, NothingListening) else OutcomeKind.LOST
            )
            return same_outcome_for_all(request.batch, fate, f"{where}: {error}")
        outcomes: list[SliceOutcome | None] = [None] * len(request.batch.slices)
        missing = broken = ""
        request.stop.doing = f"waiting for {where}"
        try:
            with request.stop.calling_on_stop(link.abort):
                missing = use(link, outcomes)
        except (RdmaPeerGone, VerbsError) as error:
            missing = broken = str(error)
        except BaseException:
            self._discard(link)
            raise
        if broken or request.stop.stopped:
            self._discard(link)
        else:
            self._put_back(link)
        lost = SliceOutcome(OutcomeKind.LOST, f"{where}: {missing}")
        return [outcome or lost for outcome in outcomes]

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return None: there are no views over a wire."""
        return None

    def revoke(self, key: bytes) -> None:
        """Withdraw the registrations: the devices refuse peers' accesses from now on."""
        self._memory.revoke(key)

    def evict(self, key: bytes) -> None:
        """Do nothing: `revoke` has ended all accesses."""

    def forget(self, segment: str) -> None:
        """Close idle links to this peer."""
        with self._lock:
            dropped = [link for link in self._idle if link.peer.name == segment]
            self._idle = [link for link in self._idle if link.peer.name != segment]
        for link in dropped:
            link.close()

    def gauges(self) -> BackendGauges:
        """Return the links of both sides."""
        with self._lock:
            n_links = len(self._idle) + self._n_busy
        return BackendGauges(
            n_connections=n_links + self._server.n_connections,
            n_malformed=self._server.n_malformed,
        )

    def impaired_rails(self) -> dict[RailEndpoints, RailPhase]:
        """Return the rails that are not used now, with the phase of their repair."""
        return self._health.impaired()

    def close(self) -> None:
        """Close all links, stop listening, free the devices."""
        self._repairs.set()
        self._health.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
        self._server.close()
        self._close_devices()

    def _close_devices(self) -> None:
        self._memory.close()
        for device in self._devices.values():
            device.close()

    def _take(self, peer: SegmentDescriptor, stop: StopSignal) -> RdmaLink:
        """Return an idle link to this peer that is alive, or a new one."""
        with self._lock:
            self._n_busy += 1
        try:
            while (link := self._take_idle(peer)) is not None:
                try:
                    link.require_alive()
                except RdmaPeerGone:
                    link.close()
                else:
                    return link
            return self._dial(peer, stop)
        except BaseException:
            with self._lock:
                self._n_busy -= 1
            raise

    def _take_idle(self, peer: SegmentDescriptor) -> RdmaLink | None:
        with self._lock:
            for index in reversed(range(len(self._idle))):
                if self._idle[index].peer == peer:
                    return self._idle.pop(index)
        return None

    def _dial(self, peer: SegmentDescriptor, stop: StopSignal) -> RdmaLink:
        stop.doing = f"connecting to {_where(peer)}"
        timeout_s = min(self._connect_timeout_s, stop.remaining_s())
        try:
            host, port = split_address(peer.endpoints[self.name].address, 0)
            sock = connect_any(host, port, time.monotonic() + timeout_s, stop)
        except (OSError, ValueError) as error:
            is_over = stop.stopped or stop.remaining_s() == 0.0
            raise (RdmaPeerGone if is_over else NothingListening)(str(error)) from error
        link = RdmaLink(sock, peer, self._health)
        try:
            with stop.calling_on_stop(link.abort):
                link.greet(self._devices, self._connect_timeout_s, self._key)
        except BaseException:
            link.close()
            raise
        return link

    def _try_rail(self, pair: RailEndpoints, peer: SegmentDescriptor) -> None:
        """Connect one rail over a link of its own and send an empty write."""
        try:
            link = self._dial(peer, self._repairs)
        except LinkRefused as turned:
            raise RdmaPeerGone(str(turned)) from turned
        except VerbsError as error:
            raise RailFailed(str(error)) from error
        try:
            rail = next((rail for rail in link.rails if rail.pair == pair), None)
            if rail is None:
                raise RailFailed("its devices are not a pair any more")
            with self._repairs.calling_on_stop(link.abort):
                link.connect(rail)
                link.probe(rail)
        except VerbsError as error:
            raise RailFailed(str(error)) from error
        finally:
            link.close()

    def _put_back(self, link: RdmaLink) -> None:
        with self._lock:
            self._n_busy -= 1
            self._idle.append(link)
            surplus = self._idle[: max(0, len(self._idle) - self._max_idle)]
            del self._idle[: len(surplus)]
        for old in surplus:
            old.close()

    def _discard(self, link: RdmaLink) -> None:
        with self._lock:
            self._n_busy -= 1
        link.close()


def _side_channel(context: EngineContext, port: int) -> Endpoint:
    """Return the endpoint to advertise for the side channel: the host of TCP, a port of its own."""
    if context.advertise is None:
        return advertised_address(context.bind, port, None)
    host, _ = split_address(context.advertise, port)
    return advertised_address(context.bind, port, join_address(host, port))


def _where(peer: SegmentDescriptor) -> str:
    endpoint = peer.endpoints["rdma"]
    return f"segment {peer.name} by rdma, side channel {endpoint.address} ({endpoint.origin})"
