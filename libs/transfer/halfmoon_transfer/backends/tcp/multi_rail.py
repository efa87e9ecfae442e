"""Spread batches over all addresses of a TCP peer.

`spray` chooses the address, and `TcpBackend` carries. Each batch to a peer with several addresses
goes over one of them, its *rail*. A rail is paused when it loses a batch or is silent for too long;
the plan sends the lost slices again, over another rail. After the pause a probe dials the rail in
the background, so that no transfer has to.

Silence has a limit only for peers with several addresses: with one address there is nothing better
to do than to wait until the transfer's deadline.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.backend_interface import (
    BackendCapabilities,
    BackendGauges,
    CarryRequest,
    EngineContext,
)
from halfmoon_transfer.backends.tcp.lane import LaneRefused
from halfmoon_transfer.backends.tcp.route_lookup import nic_towards
from halfmoon_transfer.backends.tcp.tcp_backend import TcpBackend
from halfmoon_transfer.backends.tcp.tcp_frames import TcpFrameError
from halfmoon_transfer.interface import Op, Piece
from halfmoon_transfer.metadata.descriptor import Endpoint, SegmentDescriptor, rail_name
from halfmoon_transfer.planning.spray import Spray, SprayLimits, SprayTicket
from halfmoon_transfer.planning.topology import Topology
from halfmoon_transfer.planning.transfer_plan import OutcomeKind, SliceOutcome
from halfmoon_transfer.threads.deadline_watcher import DeadlineWatcher
from halfmoon_transfer.threads.stop_signal import StopSignal

CarryOverRail = Callable[[CarryRequest], Sequence[SliceOutcome]]
_SECOND_RAIL = rail_name("tcp", 1)
#: Assumed bytes per second of a rail without measurements.
_SLOWEST = 1e6
#: Ratio of a batch's time limit to its expected time, beyond the rail's stall time.
_SLACK = 4.0
#: How often the time limit of a retried batch doubles, at most.
_MAX_DOUBLINGS = 3


class MultiRailTcp:
    """The backend "tcp": one or several addresses per peer."""

    name = "tcp"
    capabilities = BackendCapabilities(
        other_processes=True,
        host_memory=True,
        notifications=True,
        views=False,
        checks_accesses=True,
    )

    def __init__(self, context: EngineContext) -> None:
        self._inner = TcpBackend(context)
        self.slice_bytes = self._inner.slice_bytes
        self._label = f"halfmoon-transfer-{context.name}-tcp"
        self._regions = context.regions
        self._topology = context.topology
        self._stall_s = context.settings.rail_stall_s
        self._probe_s = context.settings.connect_timeout_s
        self._limits = SprayLimits(
            cooldown_s=context.settings.rail_cooldown_s,
            cooldown_max_s=context.settings.rail_cooldown_max_s,
        )
        # Guards all below; `_changed` is notified of pauses and of the end.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Peers with several rails, by segment.
        self._peers: dict[str, _Peer] = {}
        #: Ends silent batches; made when first needed, like the thread that probes.
        self._watch: DeadlineWatcher[_Try] | None = None
        self._prober: threading.Thread | None = None
        #: Set while a probe dials.
        self._probing: StopSignal | None = None
        self._closed = False

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """One endpoint per address."""
        return self._inner.endpoints

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Return whether the peer listens for TCP."""
        return self._inner.reaches(peer)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch over the best rail."""
        return self._carry_over_rails(request, self._inner.carry)

    def try_fast_path(
        self,
        peer: SegmentDescriptor,
        op: Op,
        pieces: Sequence[Piece],
        local: tuple[memoryview, ...],
        deadline: float,
    ) -> bool:
        """Move a few pieces over an idle connection to a peer that has one address."""
        several = _SECOND_RAIL in peer.endpoints
        return not several and self._inner.try_fast_path(peer, op, pieces, local, deadline)

    def notify(self, request: CarryRequest) -> SliceOutcome:
        """Deliver the notification over the best rail."""
        return self._carry_over_rails(request, lambda each: [self._inner.notify(each)])[0]

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """Return None: there are no views over a wire."""
        return self._inner.view(peer, key)

    def revoke(self, key: bytes) -> None:
        """Make the connections of all rails forget the region."""
        self._inner.revoke(key)

    def evict(self, key: bytes) -> None:
        """Cut the connections that access the region now."""
        self._inner.evict(key)

    def hang_up(self) -> None:
        """Cut all connections of peers to us, on each rail."""
        self._inner.hang_up()

    def is_quiet(self) -> bool:
        """Return whether nothing is received any more over connections that were cut."""
        return self._inner.is_quiet()

    def forget(self, segment: str) -> None:
        """Close idle connections to this peer, and forget the measurements of its rails."""
        with self._lock:
            self._peers.pop(segment, None)
        self._inner.forget(segment)

    def is_unsettled(self, peer: SegmentDescriptor) -> bool:
        """See `TcpBackend.is_unsettled`; connections are counted over all rails."""
        return self._inner.is_unsettled(peer)

    def settle(self, peer: SegmentDescriptor, stop: StopSignal) -> None:
        """See `TcpBackend.settle`; any rail leads to the peer that cuts those of all."""
        self._inner.settle(peer, stop)

    def gauges(self) -> BackendGauges:
        """Return the connections of both sides, over all rails."""
        return self._inner.gauges()

    def close(self) -> None:
        """Close all connections and stop listening."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._probing is not None:
                self._probing.set()
            prober = self._prober
        if prober is not None:
            prober.join()
        if self._watch is not None:
            self._watch.close()
        self._inner.close()

    def _carry_over_rails(
        self, request: CarryRequest, carry: CarryOverRail
    ) -> Sequence[SliceOutcome]:
        rails = request.peer.rails(self.name)
        if len(rails) < 2:
            return _hook_rail(request, rails[0].address, carry) if rails else carry(request)
        outcomes: Sequence[SliceOutcome] = ()
        for _ in rails:
            outcomes = self._carry_over_best(rails, request, carry)
            # Nothing was sent: retry over another rail at once.
            if outcomes[0].kind is not OutcomeKind.UNREACHABLE or not self._has_good(request.peer):
                break
        return outcomes

    def _has_good(self, wanted: SegmentDescriptor) -> bool:
        """Return whether a rail to this peer is not paused."""
        with self._lock:
            peer = self._peers.get(wanted.name)
            return peer is not None and peer.spray.n_good > 0

    def _carry_over_best(
        self, rails: tuple[Endpoint, ...], request: CarryRequest, carry: CarryOverRail
    ) -> Sequence[SliceOutcome]:
        n_bytes = sum(each.length for each in request.batch.slices)
        location = self._regions.index.location(request.batch.slices[0].local.key)
        with self._lock:
            peer = self._known(request.peer, rails)
        # This may look a name up.
        distances = peer.distances(location, self._topology)
        with self._lock:
            peer.used_at = time.monotonic()
            ticket = peer.spray.choose(n_bytes, peer.used_at, distances)
            limit_s = self._time_limit_s(request, peer.spray.expected_s(ticket), n_bytes)
            watch = self._watching()
        attempt = _Try(request.stop.deadline, limit_s)
        request.stop.doing = f"waiting for segment {request.peer.name} over rail {ticket.rail}"
        there = peer.over(ticket.rail)
        watch.watch(attempt)
        try:
            with request.stop.calling_on_stop(attempt.stop.set):
                part = msgspec.structs.replace(request, peer=there, stop=attempt.stop)
                outcomes = _hook_rail(part, ticket.rail, carry)
        except BaseException:
            with self._lock:
                peer.spray.dropped(ticket)
            raise
        finally:
            watch.forget(attempt)
        lost = any(
            outcome.kind in (OutcomeKind.LOST, OutcomeKind.UNREACHABLE) for outcome in outcomes
        )
        self._settle(peer, ticket, attempt, request, lost=lost)
        if not (lost and attempt.silent):
            return outcomes
        reason = f"rail {ticket.rail} to segment {request.peer.name}: silent for {limit_s:.2f} s"
        silent = SliceOutcome(OutcomeKind.LOST, reason)
        return [silent if each.kind is OutcomeKind.LOST else each for each in outcomes]

    def _time_limit_s(self, request: CarryRequest, expected_s: float | None, n_bytes: int) -> float:
        needed = n_bytes / _SLOWEST if expected_s is None else expected_s * _SLACK
        # A peer that is silent on every rail may only be busy: each retry has more time.
        n_tries = min(request.batch.slices[0].tries, _MAX_DOUBLINGS)
        return self._stall_s * 2.0**n_tries + needed

    def _known(self, wanted: SegmentDescriptor, rails: tuple[Endpoint, ...]) -> "_Peer":
        peer = self._peers.get(wanted.name)
        if peer is None or peer.descriptor != wanted:
            peer = self._peers[wanted.name] = _Peer(wanted, rails, self._limits)
        return peer

    def _watching(self) -> "DeadlineWatcher[_Try]":
        if self._watch is None:
            self._watch = DeadlineWatcher(f"{self._label}-watch", _Try.end)
        return self._watch

    def _settle(
        self,
        peer: "_Peer",
        ticket: SprayTicket,
        attempt: "_Try",
        request: CarryRequest,
        *,
        lost: bool,
    ) -> None:
        now = time.monotonic()
        # A deadline that passes in silence counts against the rail like a silent batch.
        overdue = request.stop.stopped and now >= request.stop.deadline
        with self._changed:
            if lost and request.stop.stopped and not attempt.silent and not overdue:
                peer.spray.dropped(ticket)
            elif not lost:
                peer.spray.got_through(ticket, now)
            elif peer.spray.failed(ticket, now):
                self._start_probing()

    # Probes.

    def _start_probing(self) -> None:
        """Start a thread that probes paused rails, unless there is one."""
        if self._closed:
            return
        if self._prober is None:
            self._prober = threading.Thread(
                target=self._probe_all, name=f"{self._label}-probe", daemon=True
            )
            self._prober.start()
        self._changed.notify_all()

    def _probe_all(self) -> None:
        """Dial each rail after its pause, until none is paused."""
        while (due := self._next_due()) is not None:
            peer, rail, stop = due
            ok = self._answers(peer.over(rail), stop)
            with self._changed:
                self._probing = None
                peer.spray.probed(rail, time.monotonic(), ok=ok)
                forgotten = self._peers.get(peer.descriptor.name) is not peer
            if forgotten:
                # The connection of the probe is not needed.
                self._inner.forget(peer.descriptor.name)

    def _next_due(self) -> "tuple[_Peer, str, StopSignal] | None":
        """Wait for the next pause to end; None when there is none, or at the end."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                self._forget_unused(now)
                for peer in self._peers.values():
                    for rail in peer.spray.due(now, limit=1):
                        self._probing = StopSignal.after(self._probe_s)
                        return peer, rail, self._probing
                times = [peer.spray.next_due() for peer in self._peers.values()]
                known = [each for each in times if each is not None]
                if not known:
                    break
                self._changed.wait(max(0.0, min(known) - now))
            self._prober = None
            return None

    def _forget_unused(self, now: float) -> None:
        """Forget peers without traffic whose rails are paused: they may be gone for good."""
        unused_s = self._limits.cooldown_max_s
        for name, peer in list(self._peers.items()):
            if (
                peer.spray.n_in_flight == 0
                and now - peer.used_at > unused_s
                and peer.spray.paused()
            ):
                del self._peers[name]

    def _answers(self, there: SegmentDescriptor, stop: StopSignal) -> bool:
        try:
            self._inner.probe(there, stop)
        except (OSError, TcpFrameError, LaneRefused, ValueError):
            return False
        return True

    def check(self) -> None:
        """Assert what must hold between calls."""
        with self._lock:
            for peer in self._peers.values():
                peer.spray.check()


class _Peer:
    """One start of a segment that listens at several addresses."""

    def __init__(
        self, descriptor: SegmentDescriptor, rails: tuple[Endpoint, ...], limits: SprayLimits
    ) -> None:
        self.descriptor = descriptor
        self._rails = {rail.address: rail for rail in rails}
        self.spray = Spray(list(self._rails), limits)
        #: Distances by location of our memory, then by rail. Locations are few.
        self._distances: dict[str, dict[str, int]] = {}
        #: Time of the last batch.
        self.used_at = 0.0

    def distances(self, location: str, topology: Topology | None) -> dict[str, int]:
        """Return the distance of each rail's NIC from a location of our memory."""
        if topology is None:
            return {}
        if location not in self._distances:
            self._distances[location] = {
                rail: topology.tier(location, nic_towards(split_address(rail, 0)[0]))
                for rail in self._rails
            }
        return self._distances[location]

    def over(self, rail: str) -> SegmentDescriptor:
        """Return the peer's descriptor with this rail as its only address."""
        return msgspec.structs.replace(
            self.descriptor, endpoints={MultiRailTcp.name: self._rails[rail]}
        )


class _Try:
    """One batch on one rail; ended by its transfer, or after too long a silence."""

    def __init__(self, transfer_deadline: float, limit_s: float) -> None:
        self.deadline = time.monotonic() + limit_s
        self.stop = StopSignal(min(transfer_deadline, self.deadline))
        self.silent = False

    def end(self) -> None:
        """Stop the batch: it was silent for too long."""
        self.silent = True
        self.stop.set()


def _hook_rail(request: CarryRequest, rail: str, carry: CarryOverRail) -> Sequence[SliceOutcome]:
    return carry(request) if request.rail_hook is None else request.rail_hook(rail, request, carry)
