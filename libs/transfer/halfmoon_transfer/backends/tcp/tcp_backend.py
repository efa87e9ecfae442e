"""Carry batches over TCP between hosts that can dial each other.

Connections are kept and reused, at most as many per peer as batches are carried at once. When a
connection breaks, its unanswered slices are lost, and tried again. The idle connections to that
peer are closed too, as they may be dead as well.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import cast

from halfmoon_transfer.backends.addresses import advertised_address, split_address
from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
    same_outcome_for_all,
)
from halfmoon_transfer.backends.socket_io import connect_any, tune_socket
from halfmoon_transfer.backends.tcp import native
from halfmoon_transfer.backends.tcp.abandoned_connections import AbandonedConnections
from halfmoon_transfer.backends.tcp.dial_gate import DialFailed, DialGate
from halfmoon_transfer.backends.tcp.lane import Lane, LaneRefused, LaneUntrusted
from halfmoon_transfer.backends.tcp.tcp_frames import MAX_SLICE_BYTES, TcpFrameError, TcpHello
from halfmoon_transfer.backends.tcp.tcp_server import TcpServer
from halfmoon_transfer.backends.tcp.tcp_sessions import TcpSessions
from halfmoon_transfer.interface import Lost, Op, Piece
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor, rail_name
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, SliceOutcome
from halfmoon_transfer.threads.deadline_watcher import DeadlineWatcher
from halfmoon_transfer.threads.stop_signal import StopSignal


class TcpBackend:
    """Both sides of TCP."""

    name = "tcp"
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=True,
        notifications=True,
        views=False,
        checks_accesses=True,
    )

    def __init__(self, context: EngineContext) -> None:
        settings = context.settings
        self.slice_bytes = min(settings.slice_bytes, MAX_SLICE_BYTES)
        self._checksums = settings.checksums
        self._key = settings.cluster_key
        self._encrypt = settings.encryption
        self._origin = context.name, context.generation
        self._connect_timeout_s = settings.connect_timeout_s
        self._max_idle = settings.max_idle_connections
        self._spin_s = settings.spin_s
        self._lanes = settings.lanes
        self._label = f"halfmoon-transfer-{context.name}-{self.name}"
        self._abandoned = AbandonedConnections()
        self._gate = DialGate()
        #: One server per address that we listen at, and the endpoints that peers dial.
        self._servers: list[TcpServer] = []
        self._endpoints: dict[str, Endpoint] = {}
        self._use_native = settings.native and not native.missing
        self._native = (
            native.NativeServer(context.regions, settings.spin_s) if self._use_native else None
        )
        sessions = TcpSessions()
        with ExitStack() as undo:
            for index, (bind, advertise) in enumerate(
                [(context.bind, context.advertise), *context.more]
            ):
                server = TcpServer(
                    context.regions,
                    context.notification_queue,
                    sessions=sessions,
                    key=settings.cluster_key,
                    encrypt=settings.encryption,
                    bind=bind,
                    port=context.port,
                    label=f"halfmoon-transfer-{context.name}-{rail_name(self.name, index)}",
                    max_connections=settings.max_connections,
                    stall_timeout_s=settings.stall_timeout_s,
                    native=self._native,
                )
                undo.callback(server.close)
                self._servers.append(server)
                self._endpoints[rail_name(self.name, index)] = advertised_address(
                    bind, server.port, advertise
                )
            undo.pop_all()
        self._lock = threading.Lock()
        #: Idle connections with their peers; the oldest first.
        self._idle: list[tuple[SegmentDescriptor, Lane]] = []
        self._n_busy = 0
        #: Connections in use by the fast path; at most `lanes`.
        self._fast_lanes: set[Lane] = set()
        #: Ends overdue ones of the fast path; made when first needed.
        self._watch: DeadlineWatcher[Lane] | None = None
        self._closed = False

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints that peers dial."""
        return self._endpoints

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer listens for TCP."""
        return self.name in peer.endpoints

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch over one connection."""

        checksums = request.verify or (self._checksums and request.batch.checksums)

        def move(lane: Lane, outcomes: list[SliceOutcome | None]) -> None:
            lane.carry(request, outcomes, checksums=checksums)

        return self._use_lane(request, move)

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver the notification over one connection."""

        def deliver(lane: Lane, outcomes: list[SliceOutcome | None]) -> None:
            outcomes[0] = lane.notify(request)

        return self._use_lane(request, deliver)[0]

    def _use_lane(
        self, request: CarryRequest, use: Callable[[Lane, list[SliceOutcome | None]], None]
    ) -> Sequence[SliceOutcome]:
        """Take a connection, use it, and keep it if it is still good."""
        where = _where(request.peer)
        try:
            lane = self._take(request.peer, request.stop)
        except LaneUntrusted as untrusted:
            return same_outcome_for_all(
                request.batch, OutcomeKind.UNTRUSTED, f"{where}: {untrusted}"
            )
        except LaneRefused as refused:
            stale = refused.own.generation != request.peer.generation
            reason = f"{where}: {refused}"
            return same_outcome_for_all(
                request.batch, OutcomeKind.STALE if stale else OutcomeKind.LOST, reason
            )
        except DialFailed as error:
            return same_outcome_for_all(request.batch, OutcomeKind.UNREACHABLE, f"{where}: {error}")
        except (OSError, TcpFrameError, ValueError) as error:
            return same_outcome_for_all(request.batch, OutcomeKind.LOST, f"{where}: {error}")
        request.stop.doing = f"waiting for {where}"
        return self._use(request, lane, use)

    def try_fast_path(
        self,
        peer: SegmentDescriptor,
        op: Op,
        pieces: Sequence[Piece],
        local: tuple[memoryview, ...],
        deadline: float,
    ) -> bool:
        """Move a few pieces over a connection that is idle now."""
        lane = self._take_idle(peer, deadline)
        if lane is None:
            return False
        fine = intact = False
        try:
            fine = lane.try_fast_path(
                peer, op, pieces, local, checksums=self._checksums, spin_s=self._spin_s
            )
            intact = True
        except (OSError, TcpFrameError):
            self._drop_idle(lambda known: known == peer)
        finally:
            assert self._watch is not None
            self._watch.forget(lane)
            with self._lock:
                self._fast_lanes.discard(lane)
            if intact and lane.in_time:
                self._put_back(peer, lane)
            else:
                self._give_up(peer, op, lane)
        return fine

    def _use(
        self,
        request: CarryRequest,
        lane: Lane,
        use: Callable[[Lane, list[SliceOutcome | None]], None],
    ) -> Sequence[SliceOutcome]:
        """Use a connection that was taken, and keep it if it is still good."""
        outcomes: list[SliceOutcome | None] = [None] * len(request.batch.slices)
        broken = ""
        reused = lane.used
        try:
            with request.stop.calling_on_stop(lane.abort):
                use(lane, outcomes)
        except (OSError, TcpFrameError) as error:
            broken = f"{_where(request.peer)}: {error}"
        except BaseException:
            self._give_up(request.peer, request.batch.op, lane)
            raise
        if broken or request.stop.stopped:
            self._give_up(request.peer, request.batch.op, lane)
            if reused:
                self._drop_idle(lambda peer: peer == request.peer)
        else:
            self._put_back(request.peer, lane)
            if None not in outcomes:
                return cast(list[SliceOutcome], outcomes)
        missing = SliceOutcome(OutcomeKind.LOST, broken or "stopped")
        return [outcome or missing for outcome in outcomes]

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return None: there are no views over a wire."""
        return None

    def revoke(self, key: bytes) -> None:
        """Wait for the extension's accesses; Python looks the key up at each access."""
        if self._native is not None:
            self._native.revoke(key)

    def evict(self, key: bytes) -> None:
        """Cut the connections that access the region now."""
        for server in self._servers:
            server.evict(key)

    def hang_up(self) -> None:
        """Cut all connections of peers to us."""
        for server in self._servers:
            server.hang_up()

    def is_quiet(self) -> bool:
        """Return whether nothing is received any more over connections that were cut."""
        return all(server.is_quiet() for server in self._servers)

    def forget(self, segment: str) -> None:
        """Close idle connections to this peer."""
        self._gate.forget(segment)
        self._drop_idle(lambda peer: peer.name == segment)

    def probe(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """Dial this peer; the new connection replaces idle ones, which may be dead.

        Raises:
            OSError: there is no answer.
            TcpFrameError: the answer is no frame.
            LaneRefused: the peer refuses.
        """
        with self._lock:
            self._n_busy += 1
        try:
            lane = self._dial(peer, stop)
        except BaseException:
            with self._lock:
                self._n_busy -= 1
            raise
        self._gate.forget(peer.name)
        self._drop_idle(lambda known: known == peer)
        self._put_back(peer, lane)

    def is_unsettled(self, peer: SegmentDescriptor) -> bool:
        """Return whether a connection was given up in a write, and the peer may read it still."""
        return self._abandoned.any and bool(self._abandoned.of(peer))

    def settle(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """Have the peer cut connections that were given up in a write: see `TcpHello.over`.

        Raises:
            Lost: the peer does not confirm it in time.
        """
        if not self.is_unsettled(peer):
            return
        try:
            self.probe(peer, stop)
        except (OSError, TcpFrameError, LaneRefused, LaneUntrusted, ValueError) as error:
            raise Lost(f"{_where(peer)}: {error}") from error

    def gauges(self) -> BackendGauges:
        """Return the connections of both sides."""
        with self._lock:
            n_dialled = len(self._idle) + self._n_busy
        return BackendGauges(
            n_connections=n_dialled + sum(server.n_connections for server in self._servers),
            n_malformed=sum(server.n_malformed for server in self._servers),
        )

    def close(self) -> None:
        """Close all connections and stop listening."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for lane in self._fast_lanes:
                lane.end()
            watch = self._watch
        if watch is not None:
            watch.close()
        for _, lane in idle:
            lane.close()
        for server in self._servers:
            server.close()
        if self._native is not None:
            self._native.close()

    def _take(self, peer: SegmentDescriptor, stop: StopSignal) -> Lane:
        """Return an idle connection to this peer, or a new one."""
        # While an earlier write may still land, only a new connection may follow: it ends
        # the old one.
        abandoned = self._abandoned.of(peer)
        with self._lock:
            self._n_busy += 1
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == peer and not abandoned:
                    return self._idle.pop(index)[1]
        # No idle one leads to this start of the peer, so those that exist lead to an earlier start.
        self._drop_idle(
            lambda known: known.name == peer.name and known.generation != peer.generation
        )
        place = peer.name, peer.generation, peer.endpoints[self.name].address
        try:
            return self._gate.through(place, stop, lambda: self._dial(peer, stop))
        except BaseException:
            with self._lock:
                self._n_busy -= 1
            raise

    def _take_idle(self, peer: SegmentDescriptor, deadline: float) -> Lane | None:
        """Return an idle connection for the fast path; None if there is none or it is unsafe."""
        if self._abandoned.any and self._abandoned.of(peer):
            return None
        with self._lock:
            if self._closed or len(self._fast_lanes) >= self._lanes:
                return None
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == peer:
                    lane = self._idle.pop(index)[1]
                    break
            else:
                return None
            self._n_busy += 1
            self._fast_lanes.add(lane)
            if self._watch is None:
                self._watch = DeadlineWatcher(f"{self._label}-try_fast_path", Lane.end)
        lane.deadline = deadline
        self._watch.watch(lane)
        return lane

    def _dial(self, peer: SegmentDescriptor, stop: StopSignal) -> Lane:
        host, port = split_address(peer.endpoints[self.name].address, 0)
        stop.doing = f"connecting to {_where(peer)}"
        timeout_s = min(self._connect_timeout_s, stop.remaining_s())
        sock = connect_any(host, port, time.monotonic() + timeout_s, stop)
        lane = Lane(sock, self._abandoned.next_number(), use_native=self._use_native)
        over = self._abandoned.of(peer)
        hello = TcpHello(
            peer.name,
            peer.generation,
            session=self._abandoned.session,
            number=lane.number,
            over=over,
            origin=self._origin[0],
            origin_generation=self._origin[1],
        )
        try:
            # A peer that accepts and sends nothing is treated like one that does not accept.
            with stop.calling_on_stop(lane.abort):
                lane.greet(hello, self._key, encrypt=self._encrypt)
            self._abandoned.settle(peer, over)
            sock.settimeout(None)
            tune_socket(sock)
        except BaseException:
            lane.close()
            raise
        return lane

    def _put_back(self, peer: SegmentDescriptor, lane: Lane) -> None:
        if lane.spent:
            lane.close()
        with self._lock:
            self._n_busy -= 1
            if not lane.spent:
                self._idle.append((peer, lane))
            surplus = self._idle[
                : max(0, len(self._idle) - (0 if self._closed else self._max_idle))
            ]
            del self._idle[: len(surplus)]
        for _, old in surplus:
            old.close()

    def _give_up(self, peer: SegmentDescriptor, op: Op, lane: Lane) -> None:
        """Hang up in the middle of a batch."""
        if op == "write":
            self._abandoned.add(peer, lane.number)
        with self._lock:
            self._n_busy -= 1
        lane.close()

    def _drop_idle(self, unwanted: Callable[[SegmentDescriptor], bool]) -> None:
        with self._lock:
            dropped = [lane for peer, lane in self._idle if unwanted(peer)]
            self._idle = [(peer, lane) for peer, lane in self._idle if not unwanted(peer)]
        for lane in dropped:
            lane.close()


def _where(peer: SegmentDescriptor) -> str:
    endpoint = peer.endpoints["tcp"]
    return f"segment {peer.name} at {endpoint.address} ({endpoint.origin})"
