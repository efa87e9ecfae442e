"""TCP over all addresses of a peer: which one next is `spray`'s, carrying is `backend`'s.

A peer that listens at one address is carried to as before. Of one that listens at several, each
batch goes over one of them, its *rail*. A rail on which a batch is lost, or that is silent for
too long, is paused; the plan sends the lost slices again, over another rail. When the pause is
over a probe dials the paused rail in the background, so that no transfer pays for finding out.

Silence has a limit only here: where there is one address there is nothing better to do than
to wait until the transfer's deadline.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.backend_interface import BackendGauges, CarryRequest, EngineContext
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
#: Bytes per second that are expected at least of a rail that has shown nothing yet.
_SLOWEST = 1e6
#: How many times longer than expected a batch may take on a rail, beyond the patience.
_SLACK = 4.0
#: How often the patience with a batch that is tried again doubles, at the most.
_MAX_DOUBLINGS = 3


class MultiRailTcp:
    """The backend "tcp"."""

    name = "tcp"

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
        # Guards all below; `_changed` is told of pauses and of the end.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: By segment: the peer with several rails, and what is known of them.
        self._peers: dict[str, _Peer] = {}
        #: Made when first needed: who ends what is silent, and who probes.
        self._watch: DeadlineWatcher[_Try] | None = None
        self._prober: threading.Thread | None = None
        #: Set while a probe is dialling.
        self._probing: StopSignal | None = None
        self._closed = False

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Where peers dial: one per address."""
        return self._inner.endpoints

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer listens."""
        return self._inner.reaches(peer)

    def carry(self, request: CarryRequest) -> Sequence[SliceOutcome]:
        """Move a batch over the best rail."""
        return self._over_a_rail(request, self._inner.carry)

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
        """Deliver the notice over the best rail."""
        return self._over_a_rail(request, lambda each: [self._inner.notify(each)])[0]

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """There is none over a wire."""
        return self._inner.view(peer, key)

    def revoke(self, key: bytes) -> None:
        """Nobody holds on to a region."""
        self._inner.revoke(key)

    def evict(self, key: bytes) -> None:
        """Cut the connections that access the region now."""
        self._inner.evict(key)

    def forget(self, segment: str) -> None:
        """Close idle connections to this peer, and our opinion of its rails."""
        with self._lock:
            self._peers.pop(segment, None)
        self._inner.forget(segment)

    def gauges(self) -> BackendGauges:
        """Connections of both sides, over all rails."""
        return self._inner.gauges()

    def close(self) -> None:
        """Hang up on everybody and stop listening."""
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

    def _over_a_rail(self, request: CarryRequest, carry: CarryOverRail) -> Sequence[SliceOutcome]:
        rails = request.peer.rails(self.name)
        if len(rails) < 2:
            return _hook_rail(request, rails[0].address, carry) if rails else carry(request)
        outcomes: Sequence[SliceOutcome] = ()
        for _ in rails:
            outcomes = self._over_one_of(rails, request, carry)
            # Nothing was sent: another rail may do at once.
            if outcomes[0].kind is not OutcomeKind.UNREACHABLE or not self._has_good(request.peer):
                break
        return outcomes

    def _has_good(self, wanted: SegmentDescriptor) -> bool:
        """Whether a rail to this peer is not paused."""
        with self._lock:
            peer = self._peers.get(wanted.name)
            return peer is not None and peer.spray.n_good > 0

    def _over_one_of(
        self, rails: tuple[Endpoint, ...], request: CarryRequest, carry: CarryOverRail
    ) -> Sequence[SliceOutcome]:
        n_bytes = sum(each.length for each in request.batch.slices)
        location = self._regions.index.location(request.batch.slices[0].local.key)
        with self._lock:
            peer = self._known(request.peer, rails)
        # May look a name up.
        distances = peer.distances(location, self._topology)
        with self._lock:
            peer.used_at = time.monotonic()
            ticket = peer.spray.choose(n_bytes, peer.used_at, distances)
            patience = self._patience_s(request, peer.spray.expected_s(ticket), n_bytes)
            watch = self._watching()
        attempt = _Try(request.stop.deadline, patience)
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
        reason = f"rail {ticket.rail} to segment {request.peer.name}: silent for {patience:.2f} s"
        silent = SliceOutcome(OutcomeKind.LOST, reason)
        return [silent if each.kind is OutcomeKind.LOST else each for each in outcomes]

    def _patience_s(self, request: CarryRequest, expected_s: float | None, n_bytes: int) -> float:
        needed = n_bytes / _SLOWEST if expected_s is None else expected_s * _SLACK
        # What is silent on every rail is perhaps the peer, which may only be busy: it is given
        # more time with each try.
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
        # A deadline that passes in silence is the rail's fault as much as our impatience's.
        overdue = request.stop.stopped and now >= request.stop.deadline
        with self._changed:
            if lost and request.stop.stopped and not attempt.silent and not overdue:
                peer.spray.dropped(ticket)
            elif not lost:
                peer.spray.got_through(ticket, now)
            elif peer.spray.failed(ticket, now):
                self._see_to_probes()

    # Probes.

    def _see_to_probes(self) -> None:
        """Have somebody look after a rail that was just paused."""
        if self._closed:
            return
        if self._prober is None:
            self._prober = threading.Thread(
                target=self._probe_all, name=f"{self._label}-probe", daemon=True
            )
            self._prober.start()
        self._changed.notify_all()

    def _probe_all(self) -> None:
        """Dial each rail whose pause is over, until none is paused."""
        while (due := self._next_due()) is not None:
            peer, rail, stop = due
            ok = self._answers(peer.over(rail), stop)
            with self._changed:
                self._probing = None
                peer.spray.probed(rail, time.monotonic(), ok=ok)
                forgotten = self._peers.get(peer.descriptor.name) is not peer
            if forgotten:
                # Nobody waits for the connection that the probe has left.
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
        """Nobody is interested in these any more: perhaps they are gone for good."""
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
        #: By location of our memory, then by rail. Locations are few.
        self._distances: dict[str, dict[str, int]] = {}
        #: When a batch was sent to it last.
        self.used_at = 0.0

    def distances(self, location: str, topology: Topology | None) -> dict[str, int]:
        """How far each rail's card is from our memory there."""
        if topology is None:
            return {}
        if location not in self._distances:
            self._distances[location] = {
                rail: topology.tier(location, nic_towards(split_address(rail, 0)[0]))
                for rail in self._rails
            }
        return self._distances[location]

    def over(self, rail: str) -> SegmentDescriptor:
        """The peer, as if this were its only address."""
        return msgspec.structs.replace(
            self.descriptor, endpoints={MultiRailTcp.name: self._rails[rail]}
        )


class _Try:
    """One batch on one rail: it ends with its transfer, or when it was silent for too long."""

    def __init__(self, transfer_deadline: float, patience_s: float) -> None:
        self.deadline = time.monotonic() + patience_s
        self.stop = StopSignal(min(transfer_deadline, self.deadline))
        self.silent = False

    def end(self) -> None:
        """It was silent for too long."""
        self.silent = True
        self.stop.set()


def _hook_rail(request: CarryRequest, rail: str, carry: CarryOverRail) -> Sequence[SliceOutcome]:
    return carry(request) if request.rail_hook is None else request.rail_hook(rail, request, carry)
