"""Transfer over Mooncake's TCP protocol: to its Transfer Engine, and between Halfmoon engines.

The protocol has no keys, generations or checksums. Every process that reaches the data port may
read and write every registered region, by address. Use this backend only where the network is
trusted.

A region of a *Halfmoon* engine has its ordinary key. Its address comes from that engine's
record, which is valid while its epoch lasts (see `exposed_regions`). A region of a *foreign*
segment has address and length for a key. Access is refused once no such buffer is registered
there, but another buffer at the same address can't be told apart.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_transfer.backends.addresses import advertised_address, join_address, split_address
from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
)
from halfmoon_transfer.backends.mooncake import mooncake_handshake, mooncake_peers
from halfmoon_transfer.backends.mooncake.batch_over_lane import move_batch
from halfmoon_transfer.backends.mooncake.exposed_regions import ExposedRegions
from halfmoon_transfer.backends.mooncake.mooncake_frames import FrameVersion, MooncakeFrameError
from halfmoon_transfer.backends.mooncake.mooncake_handshake import MooncakeRefusal
from halfmoon_transfer.backends.mooncake.mooncake_lane_pool import (
    MAX_BINDS,
    MooncakeLanePool,
    StaleSegment,
)
from halfmoon_transfer.backends.mooncake.mooncake_ports import DataPort, HandshakePort
from halfmoon_transfer.backends.mooncake.mooncake_records import (
    MooncakeNotification,
    RecordError,
    RpcRecord,
    SegmentRecord,
)
from halfmoon_transfer.backends.mooncake.mooncake_registry import MooncakeRegistry
from halfmoon_transfer.backends.socket_listener import SocketListener
from halfmoon_transfer.interface import Lost, Rejected
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, SliceOutcome
from halfmoon_transfer.threads.stop_signal import StopSignal

_log = logging.getLogger(__name__)


class MooncakeBackend:
    """The "mooncake" backend: serves our regions and reaches those of peers."""

    name = "mooncake"
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=True,
        notifications=False,
        views=False,
        checks_accesses=False,
    )

    def __init__(self, home: EngineContext) -> None:
        settings = home.settings
        self.slice_bytes = settings.slice_bytes
        if settings.cluster_key is not None:
            _log.warning(
                "segment %s speaks Mooncake's protocol, which has no place for the cluster key: "
                "any process that reaches its ports is served there",
                home.name,
            )
        self._label = f"halfmoon-transfer-{home.name}-mooncake"
        self._lock = threading.Lock()
        #: Foreign segments that were opened, by the name they were opened under.
        self._foreign: dict[str, SegmentDescriptor] = {}
        self._regions = home.regions
        self.exposed = ExposedRegions(home.regions)
        self._lanes = MooncakeLanePool(
            self.record,
            connect_timeout_s=settings.connect_timeout_s,
            max_idle=settings.max_idle_connections,
        )
        self._data = DataPort(self.exposed)
        self._handshake = HandshakePort(self.record, settings.mooncake.max_notifications)
        with ExitStack() as undo:
            self._data_listener = self._listen(
                home, "data", self._data.serve, settings.mooncake.data_port, undo
            )
            self._handshake_listener = self._listen(
                home, "handshake", self._handshake.serve, settings.mooncake.handshake_port, undo
            )
            self._data_endpoint = _advertised(home, self._data_listener.port)
            self._handshake_endpoint = _advertised(home, self._handshake_listener.port)
            host, port = split_address(self._handshake_endpoint.address, 0)
            self._registry = MooncakeRegistry(settings.mooncake, home.name, RpcRecord(host, port))
            undo.callback(self._registry.withdraw)
            self._data_listener.start()
            self._handshake_listener.start()
            self._registry.announce_rpc()
            self._announce()
            home.regions.add_watcher(self._announce)
            undo.pop_all()

    def _listen(
        self,
        home: EngineContext,
        what: str,
        serve: Callable[[socket.socket], None],
        port: int,
        undo: ExitStack,
    ) -> SocketListener:
        listener = SocketListener(
            serve,
            malformed=MooncakeFrameError,
            bind=home.bind,
            port=port,
            label=f"{self._label}-{what}",
            max_connections=home.settings.max_connections,
            stall_timeout_s=home.settings.stall_timeout_s,
        )
        undo.callback(listener.close)
        return listener

    # Our segment as peers see it.

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints of both ports."""
        return {"mooncake": self._handshake_endpoint, "mooncake-v2": self._data_endpoint}

    @property
    def segment_name(self) -> str:
        """Name under which Mooncake peers open our segment."""
        return self._registry.name

    def record(self) -> SegmentRecord:
        """Build our current segment record."""
        host, port = split_address(self._data_endpoint.address, 0)
        return self.exposed.record(self._registry.name, host, port)

    def _announce(self) -> None:
        if not self._registry.is_p2p:
            with self._registry.lock:
                self._registry.announce(self.record())

    def revoke(self, key: bytes) -> None:
        """Invalidate the addresses that Halfmoon peers know, and republish our record."""
        del key
        self.exposed.next_epoch()
        try:
            self._announce()
        except MetadataError as error:
            _log.warning(
                "the Mooncake record of segment %s still has a region that is gone: %s",
                self._registry.name,
                error,
            )

    def evict(self, key: bytes) -> None:
        """Close the connections that access the region now."""
        for sock in self._data.accessing(key):
            self._data_listener.hang_up(sock)

    # Carrying.

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return True if the peer has a Mooncake data port."""
        return mooncake_peers.reaches(peer)

    def carry(self, errand: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch, over one connection as long as nothing is refused."""
        outcomes: list[SliceOutcome | None] = [None] * len(errand.batch.slices)
        failure: SliceOutcome | None = None
        n_binds = 0
        while failure is None and None in outcomes and not errand.stop.stopped:
            if n_binds == MAX_BINDS and mooncake_peers.is_halfmoon(errand.peer):
                failure = SliceOutcome(
                    OutcomeKind.LOST,
                    f"{mooncake_peers.describe_peer(errand.peer)}: its regions keep changing",
                )
            else:
                failure = self._carry(errand, outcomes, fresh=n_binds > 0)
            n_binds += 1
        missing = failure or SliceOutcome(OutcomeKind.LOST, "stopped")
        return [outcome or missing for outcome in outcomes]

    def notify(self, errand: CarryRequest) -> SliceOutcome:
        """Refuse: Mooncake's messages can't carry the guarantees of a notification."""
        return SliceOutcome(
            OutcomeKind.UNUSABLE,
            f"{mooncake_peers.describe_peer(errand.peer)}: no notifications over Mooncake",
        )

    def _carry(
        self, errand: CarryRequest, outcomes: list[SliceOutcome | None], *, fresh: bool
    ) -> SliceOutcome | None:
        """Move the slices without an outcome over one connection.

        Returns:
            The outcome of the remaining slices, or None if none remain or a retry is due.
        """
        where = mooncake_peers.describe_peer(errand.peer)
        try:
            lane = self._lanes.take(errand.peer, errand.stop, fresh=fresh)
        except StaleSegment as stale:
            return SliceOutcome(OutcomeKind.STALE, f"{where}: {stale}")
        except (OSError, ValueError) as error:
            is_gone = isinstance(error, (ConnectionRefusedError, TimeoutError))
            is_over = errand.stop.stopped or errand.stop.remaining_s() == 0.0
            kind = OutcomeKind.UNREACHABLE if is_gone and not is_over else OutcomeKind.LOST
            return SliceOutcome(kind, f"{where}: {error}")
        reused = lane.used
        lane.used = True
        errand.stop.doing = f"waiting for {where}"
        is_reusable = False
        try:
            with errand.stop.calling_on_stop(lane.abort):
                is_reusable = move_batch(lane, errand, outcomes, trusted=not reused)
        except (OSError, MooncakeFrameError) as error:
            if reused:
                self._lanes.drop_idle(errand.peer.name)
            return SliceOutcome(
                OutcomeKind.LOST, f"{where}: {error}{mooncake_peers.failure_hint(errand.peer)}"
            )
        finally:
            if is_reusable and not errand.stop.stopped:
                self._lanes.put_back(errand.peer, lane)
            else:
                self._lanes.discard(lane)
        return None

    # Foreign segments; `mooncake_api` offers this to users.

    def open(self, name: str, stop: StopSignal) -> tuple[SegmentDescriptor, SegmentRecord]:
        """Look up a foreign segment; return its descriptor and its record.

        Raises:
            ValueError: the name is not valid.
            Lost: the segment can't be found or does not answer.
        """
        try:
            record, host = self._find(name, stop)
        except (OSError, MooncakeFrameError, RecordError) as error:
            raise Lost(f"Mooncake segment {name}: {error}") from error
        version: FrameVersion = 2 if record.tcp_proto_version >= 2 else 1
        address = join_address(record.tcp_data_host or host, record.tcp_data_port)
        try:
            split_address(address, 0)
        except ValueError as error:
            raise Lost(f"Mooncake segment {name} has no usable data host: {error}") from None
        with self._lock:
            known = self._foreign.get(name)
            generation = 1 if known is None else known.generation
            found = mooncake_peers.foreign_descriptor(name, generation, address, version)
            if known not in (None, found):
                # Another data port: the segment was restarted, and old regions are invalid.
                found = mooncake_peers.foreign_descriptor(name, generation + 1, address, version)
            self._foreign[name] = found
        return found, record

    def _find(self, name: str, stop: StopSignal) -> tuple[SegmentRecord, str]:
        if not self._registry.is_p2p:
            record = self._registry.record(name)
            return record, record.tcp_data_host or self._registry.rpc_address(name)[0]
        host, port = self._registry.rpc_address(name)
        own = self.record()
        return self._lanes.ask(
            host, port, stop, lambda sock: mooncake_handshake.exchange_records(sock, own)
        ), host

    def send_message(self, name: str, notification: MooncakeNotification, stop: StopSignal) -> None:
        """Send a message to a segment's handshake port.

        Raises:
            ValueError: the name is not valid, or the message is too long.
            Rejected: the peer does not accept the message.
            Lost: the segment can't be found or does not answer.
        """
        self._handshake_with(
            name, stop, lambda sock: mooncake_handshake.send_notification(sock, notification)
        )

    def probe(self, name: str, stop: StopSignal) -> None:
        """Check that a segment's handshake port answers; raises like `send_message`."""
        self._handshake_with(name, stop, mooncake_handshake.send_probe)

    def _handshake_with(
        self, name: str, stop: StopSignal, ask: Callable[[socket.socket], None]
    ) -> None:
        try:
            host, port = self._registry.rpc_address(name)
            self._lanes.ask(host, port, stop, ask)
        except MooncakeRefusal as refused:
            raise Rejected(f"Mooncake segment {name}: {refused!s:.500}") from None
        except (OSError, MooncakeFrameError, RecordError) as error:
            raise Lost(f"Mooncake segment {name}: {error}") from error

    def notifications(self) -> list[MooncakeNotification]:
        """Return the messages received since the last call."""
        return self._handshake.take()

    # Other methods of a backend.

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return None: there is no view over a network."""
        return None

    def forget(self, segment: str) -> None:
        """Close idle connections to this peer."""
        self._lanes.drop_idle(segment)

    def gauges(self) -> BackendGauges:
        """Count the connections that we dialled and accepted."""
        listeners = (self._data_listener, self._handshake_listener)
        return BackendGauges(
            n_connections=self._lanes.n_connections + sum(each.n_connections for each in listeners),
            n_malformed=sum(each.n_malformed for each in listeners),
        )

    def close(self) -> None:
        """Withdraw our records, close all connections and stop listening."""
        self._regions.remove_watcher(self._announce)
        self._registry.withdraw()
        self._lanes.close()
        self._handshake_listener.close()
        self._data_listener.close()


def _advertised(home: EngineContext, port: int) -> Endpoint:
    """Return the endpoint that peers dial: the engine's host with one of our ports."""
    host = home.advertise if home.advertise is None else split_address(home.advertise, 1)[0]
    if host is not None and ":" in host:
        host = f"[{host}]"
    return advertised_address(home.bind, port, host)
