"""Connect to an owner over RDMA: one side channel, and a rail per pair of devices.

This is the initiator's side, used by one thread at a time, like a lane of TCP. The side channel
proves that the owner is alive. While it stands, a failure is a rail's fault; once it has closed,
the peer is gone.
"""

import contextlib
import os
import select
import socket
import time
from collections import OrderedDict
from typing import TypeVar

import msgspec

from halfmoon_transfer.backends.peer_text import printable_text
from halfmoon_transfer.backends.rdma import rdma_handshake
from halfmoon_transfer.backends.rdma.rail import Rail
from halfmoon_transfer.backends.rdma.rail_health import (
    RailEndpoints,
    RailFailed,
    RailHealth,
    RdmaPeerGone,
)
from halfmoon_transfer.backends.rdma.rail_pairing import pair_devices
from halfmoon_transfer.backends.rdma.rdma_device import RdmaDevice
from halfmoon_transfer.backends.rdma.rdma_handshake import (
    ConnectRail,
    FenceRail,
    HandshakeError,
    InitiatorProof,
    NotificationResult,
    OwnerProof,
    RailConnected,
    RailFenced,
    RdmaFailure,
    RdmaHello,
    RdmaRegionDenial,
    RdmaRegionGrant,
    RdmaRegionRequest,
    RdmaReply,
    RdmaRequest,
    RdmaWelcome,
)
from halfmoon_transfer.backends.rdma.verbs import CompletionStatus as Completed
from halfmoon_transfer.backends.rdma.verbs import RdmaOperation, VerbsError, completion_status_text
from halfmoon_transfer.backends.socket_io import hang_up, send_all, tune_socket
from halfmoon_transfer.cluster_key import ClusterKey, ProverRole, key_mismatch_hint, make_nonce
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.regions.access import AccessRefused

R = TypeVar("R", bound=RdmaReply)
#: Grants of the peer that are kept.
_MAX_GRANTS = 128
#: Timeout of an answer: the owner may have to register much memory first.
_ANSWER_S = 15.0
#: Timeout of an empty write: longer than a rail takes to report a failure.
_PROBE_S = 2.0
#: Interval of polling for completions that a driver forgets to announce.
_TICK_S = 0.1


class LinkRefused(Exception):
    """A link that the owner refuses; `own` is the owner's welcome."""

    def __init__(self, own: RdmaWelcome) -> None:
        super().__init__(printable_text(own.refused))
        self.own = own


class LinkUntrusted(LinkRefused):
    """An owner with another cluster key, or only one side has a key."""

    def __init__(self, own: RdmaWelcome, reason: str) -> None:
        super().__init__(msgspec.structs.replace(own, refused=reason))


class RdmaLink:
    """One side channel, its rails, and the grants of the owner."""

    def __init__(self, sock: socket.socket, peer: SegmentDescriptor, health: RailHealth) -> None:
        self.peer = peer
        self.rails: list[Rail] = []
        self.health = health
        self._socket = sock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: By region key, the most recently used last.
        self._grants: OrderedDict[bytes, RdmaRegionGrant] = OrderedDict()

    def greet(
        self, devices: dict[str, RdmaDevice], timeout_s: float, key: ClusterKey | None = None
    ) -> None:
        """Check which segment answers, and make the rails to its devices, not connected yet.

        Raises:
            LinkRefused: another segment answers, or it has no room.
            LinkUntrusted: the cluster keys of both sides differ.
            RdmaPeerGone: it hung up or sent nonsense.
            VerbsError: a device of ours failed.
        """
        tune_socket(self._socket)
        self._socket.settimeout(timeout_s)
        welcome = self._exchange_hellos(key)
        self._socket.settimeout(_ANSWER_S)
        local: dict[str, str] = {}
        for name, device in devices.items():
            with contextlib.suppress(VerbsError):  # it has no address just now
                local[name] = device.gid().text
        for name, far in pair_devices(local, welcome.devices)[: rdma_handshake.MAX_RAILS]:
            pair = RailEndpoints(name, far, welcome.devices[far])
            self.rails.append(Rail(len(self.rails), devices[name], pair))

    def _exchange_hellos(self, key: ClusterKey | None) -> RdmaWelcome:
        """Name the wanted segment, and exchange proofs of the cluster key if there is one."""
        words = b"" if key is None else make_nonce()
        hello = RdmaHello(rdma_handshake.VERSION, self.peer.name, self.peer.generation, words)
        welcome = self._ask(hello, RdmaWelcome)
        if key is None and welcome.nonce:
            raise LinkUntrusted(welcome, welcome.refused or key_mismatch_hint("there", "here"))
        if welcome.refused:
            raise LinkRefused(welcome)
        if key is None:
            return welcome
        if not welcome.nonce:
            raise LinkUntrusted(welcome, key_mismatch_hint("here", "there"))
        transcripts = (
            rdma_handshake.proof_transcript(hello),
            rdma_handshake.proof_transcript(welcome),
        )
        theirs = self._ask(
            InitiatorProof(key.prove(ProverRole.INITIATOR, *transcripts)), OwnerProof
        )
        if theirs.proof is None or not key.accepts(theirs.proof, ProverRole.OWNER, *transcripts):
            raise LinkUntrusted(welcome, theirs.refused or "it does not know our cluster key")
        return welcome

    def connect(self, rail: Rail) -> None:
        """Connect a rail that is new or has failed.

        Raises:
            RailFailed: one of its ends failed; the text says why.
            RdmaPeerGone: the side channel broke.
        """
        try:
            end = rail.prepare()
            answer = self._ask(ConnectRail(rail.number, rail.pair.remote, end), RailConnected)
            rail.connect(answer.end, answer.slot)
        except VerbsError as error:
            raise RailFailed(str(error)) from error

    def fence(self, rail: Rail) -> None:
        """Have the owner drop all packets of a failed rail, so that they never land.

        Raises:
            RdmaPeerGone: the side channel broke.
        """
        self._fence(rail)

    def _fence(self, rail: Rail) -> NotificationResult | None:
        """Fence a rail; return the answer to a notification that had arrived before."""
        try:
            send_all(self._socket, [rdma_handshake.encode(FenceRail(rail.number))])
            answer = rdma_handshake.decode_reply(rdma_handshake.receive_body(self._socket))
            result = answer if isinstance(answer, NotificationResult) else None
            if result is not None:
                answer = rdma_handshake.decode_reply(rdma_handshake.receive_body(self._socket))
        except (OSError, HandshakeError) as error:
            raise RdmaPeerGone(str(error)) from error
        if not isinstance(answer, RailFenced):
            raise RdmaPeerGone(f"{rail.pair} could not be fenced: {answer}")
        return result

    def announce(self, rail: Rail, notification_id: bytes, body: bytes) -> NotificationResult:
        """Send a notification over a connected rail and await its result.

        Raises:
            RailFailed: the rail failed, is fenced, and the notification has not arrived.
            RdmaPeerGone: the side channel broke; whether it was delivered is unknown.
        """
        result: NotificationResult | None = None
        try:
            if not rail.announce(body):
                self._fence(rail)
                raise RailFailed("it would not take a notice")
            while rail.in_flight or result is None:
                rail.collect()
                if not rail.connected and not rail.in_flight:
                    # A notification that had arrived is answered before the fence.
                    result = self._fence(rail) or result
                    if result is None:
                        failure = rail.failure
                        raise RailFailed(
                            completion_status_text(failure.status) if failure else "it stood still"
                        )
                    break
                if self._wait(owed=result is None):
                    answer = rdma_handshake.decode_reply(rdma_handshake.receive_body(self._socket))
                    if not isinstance(answer, NotificationResult):
                        raise RdmaPeerGone(f"it answered a notice with {type(answer).__name__}")
                    result = answer
                rail.nudge(usable=self.health.usable(rail.pair))
        except (OSError, HandshakeError) as error:
            raise RdmaPeerGone(str(error)) from error
        finally:
            rail.drain()
        if result.id != notification_id:
            raise RdmaPeerGone("it answered another notice")
        return result

    def grant(self, key: bytes) -> RdmaRegionGrant:
        """Return the owner's grant of a region.

        Raises:
            AccessRefused: it has no such region.
            RailFailed: the owner can't register it.
            RdmaPeerGone: the side channel broke.
        """
        known = self._grants.get(key)
        if known is None:
            known = self._ask(RdmaRegionRequest(self.peer.generation, key), RdmaRegionGrant)
            self._grants[key] = known
        self._grants.move_to_end(key)
        while len(self._grants) > _MAX_GRANTS:
            self._grants.popitem(last=False)
        return known

    def forget_grant(self, key: bytes) -> None:
        """Forget a grant, so that the region is requested again."""
        self._grants.pop(key, None)

    def wait(self) -> None:
        """Sleep until something in flight may have completed, or until kicked.

        Raises:
            RdmaPeerGone: the side channel closed.
        """
        self._wait(owed=False)

    def _wait(self, *, owed: bool) -> bool:
        """Wait like `wait`; return whether an expected answer has come."""
        flying = {rail.fd: rail for rail in self.rails if rail.in_flight}
        # Completions before arming are not announced: poll again first.
        armed = [rail.arm() for rail in flying.values()]
        if any(armed):
            return False
        poll = select.poll()
        for fd in (*flying, self._wake, self._socket.fileno()):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_TICK_S * 1000):
            if fd in flying:
                flying[fd].take_event()
            elif fd == self._socket.fileno():
                if owed:
                    return True
                self.require_alive()
        return False

    def require_alive(self) -> None:
        """Check that the side channel is open; no answer is expected, so any byte ends it.

        Raises:
            RdmaPeerGone: the side channel closed.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return
        try:
            left = self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise RdmaPeerGone(str(error)) from error
        raise RdmaPeerGone("it spoke out of turn" if left else "it hung up")

    def probe(self, rail: Rail) -> None:
        """Send an empty write over a connected rail and wait until it is acknowledged.

        Raises:
            RailFailed: it is not acknowledged.
            RdmaPeerGone: the side channel closed.
        """
        until = time.monotonic() + _PROBE_S
        if not rail.post([RdmaOperation(0, *rail.device.nothing, 0, 0)], write=True):
            raise RailFailed("it would not take an operation")
        while time.monotonic() < until:
            for each in rail.collect():
                if each.status == Completed.SUCCESS:
                    return
                raise RailFailed(completion_status_text(each.status))
            self.wait()
        raise RailFailed(f"nothing came back in {_PROBE_S} s")

    def abort(self) -> None:
        """Wake the thread that uses the link, from another one; it is unusable afterwards."""
        os.eventfd_write(self._wake, 1)
        hang_up(self._socket)

    def close(self) -> None:
        """Hang up and free all rails; the owner frees its ends."""
        for rail in self.rails:
            rail.close()
        self._socket.close()
        os.close(self._wake)

    def _ask(self, request: RdmaRequest, kind: type[R]) -> R:
        try:
            answer = rdma_handshake.send_request(self._socket, request)
        except (OSError, HandshakeError) as error:
            raise RdmaPeerGone(str(error)) from error
        match answer:
            case RdmaFailure():
                raise RailFailed(answer.reason)
            case RdmaRegionDenial():
                raise AccessRefused(answer.status, answer.detail)
        if not isinstance(answer, kind):
            raise RdmaPeerGone(f"it answered {type(request).__name__} with {type(answer).__name__}")
        return answer
