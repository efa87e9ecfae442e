"""The initiator's side: one side channel to an owner and a rail per pair of devices.

Used by one thread at a time, like a lane of TCP. The side channel is the proof of life: while
it stands, a rail that fails is the rail's fault; once it has closed, the peer is gone.
"""

import contextlib
import os
import select
import socket
import time
from collections import OrderedDict
from typing import TypeVar

import msgspec

from halfmoon_transfer.backends.rdma import handshake
from halfmoon_transfer.backends.rdma.device import Device
from halfmoon_transfer.backends.rdma.handshake import (
    Ask,
    Connect,
    Connected,
    Denied,
    Failed,
    Fence,
    Fenced,
    Granted,
    HandshakeError,
    Hello,
    Noted,
    Prove,
    Proven,
    Reply,
    Request,
    Welcome,
)
from halfmoon_transfer.backends.rdma.health import Pair, PeerGone, RailFailed, RailHealth
from halfmoon_transfer.backends.rdma.pairing import pair_devices
from halfmoon_transfer.backends.rdma.rail import Rail
from halfmoon_transfer.backends.rdma.verbs import Operation, VerbsError, status_text
from halfmoon_transfer.backends.rdma.verbs import Status as Completed
from halfmoon_transfer.backends.tcp.sockets import send_all, tune
from halfmoon_transfer.cluster_key import ClusterKey, Role, nonce, set_it_on_both_sides
from halfmoon_transfer.descriptor import SegmentDescriptor
from halfmoon_transfer.regions import Refused

R = TypeVar("R", bound=Reply)
#: Regions of the peer whose addresses and rkeys are kept.
_MAX_GRANTS = 128
#: How long an owner may take to answer: it may have to register much memory first.
_ANSWER_S = 15.0
#: How long an empty write may take: longer than a rail takes to say that it failed.
_PROBE_S = 2.0
#: Completions are announced; this is for those that a driver forgets to announce.
_TICK_S = 0.1


class TurnedAway(Exception):
    """The owner does not want this link; `own` is who it says it is."""

    def __init__(self, own: Welcome) -> None:
        super().__init__(own.refused)
        self.own = own


class Untrusted(TurnedAway):
    """It has another cluster key, or only one of us has one."""

    def __init__(self, own: Welcome, reason: str) -> None:
        super().__init__(msgspec.structs.replace(own, refused=reason))


class Link:
    """One side channel, its rails, and what the owner has granted over it."""

    def __init__(self, sock: socket.socket, peer: SegmentDescriptor, health: RailHealth) -> None:
        self.peer = peer
        self.rails: list[Rail] = []
        self.health = health
        self._socket = sock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: By region key, the most recently used last.
        self._grants: OrderedDict[bytes, Granted] = OrderedDict()

    def greet(
        self, devices: dict[str, Device], patience_s: float, key: ClusterKey | None = None
    ) -> None:
        """Hear who answers and which devices it has; makes the rails, not connected yet.

        Raises:
            TurnedAway: it is somebody else, or it has no room.
            Untrusted: one of us does not know the other's cluster key.
            PeerGone: it hung up or makes no sense.
            VerbsError: our devices can't.
        """
        tune(self._socket)
        self._socket.settimeout(patience_s)
        welcome = self._introduce(key)
        self._socket.settimeout(_ANSWER_S)
        local: dict[str, str] = {}
        for name, device in devices.items():
            with contextlib.suppress(VerbsError):  # it has no address just now
                local[name] = device.gid().text
        for name, far in pair_devices(local, welcome.devices)[: handshake.MAX_RAILS]:
            pair = Pair(name, far, welcome.devices[far])
            self.rails.append(Rail(len(self.rails), devices[name], pair))

    def _introduce(self, key: ClusterKey | None) -> Welcome:
        """Say whom we want, and let both prove that they know the cluster key, if there is one."""
        words = b"" if key is None else nonce()
        hello = Hello(handshake.VERSION, self.peer.name, self.peer.generation, words)
        welcome = self._ask(hello, Welcome)
        if key is None and welcome.nonce:
            raise Untrusted(welcome, welcome.refused or set_it_on_both_sides("there", "here"))
        if welcome.refused:
            raise TurnedAway(welcome)
        if key is None:
            return welcome
        if not welcome.nonce:
            raise Untrusted(welcome, set_it_on_both_sides("here", "there"))
        said = handshake.words(hello), handshake.words(welcome)
        theirs = self._ask(Prove(key.prove(Role.INITIATOR, *said)), Proven)
        if theirs.proof is None or not key.accepts(theirs.proof, Role.OWNER, *said):
            raise Untrusted(welcome, theirs.refused or "it does not know our cluster key")
        return welcome

    def connect(self, rail: Rail) -> None:
        """Make a rail ready; it was made, or it failed.

        Raises:
            RailFailed: one of its ends can't; the text says why.
            PeerGone: the side channel broke.
        """
        try:
            end = rail.prepare()
            answer = self._ask(Connect(rail.number, rail.pair.remote, end), Connected)
            rail.connect(answer.end, answer.slot)
        except VerbsError as error:
            raise RailFailed(str(error)) from error

    def fence(self, rail: Rail) -> None:
        """Make sure that nothing which was posted on a failed rail lands from now on.

        Raises:
            PeerGone: the side channel broke.
        """
        self._fence(rail)

    def _fence(self, rail: Rail) -> Noted | None:
        """Fence it; what the owner says about a notice that had arrived before."""
        try:
            send_all(self._socket, [handshake.encode(Fence(rail.number))])
            answer = handshake.decode_reply(handshake.receive_body(self._socket))
            noted = answer if isinstance(answer, Noted) else None
            if noted is not None:
                answer = handshake.decode_reply(handshake.receive_body(self._socket))
        except (OSError, HandshakeError) as error:
            raise PeerGone(str(error)) from error
        if not isinstance(answer, Fenced):
            raise PeerGone(f"{rail.pair} could not be fenced: {answer}")
        return noted

    def announce(self, rail: Rail, notice_id: bytes, body: bytes) -> Noted:
        """Send a notice over a connected rail and hear what became of it.

        Raises:
            RailFailed: the rail failed, is fenced, and the notice has not arrived.
            PeerGone: the side channel broke; whether it was delivered is unknown.
        """
        noted: Noted | None = None
        try:
            if not rail.announce(body):
                self._fence(rail)
                raise RailFailed("it would not take a notice")
            while rail.in_flight or noted is None:
                rail.collect()
                if not rail.connected and not rail.in_flight:
                    # What had arrived before is answered before the fence.
                    noted = self._fence(rail) or noted
                    if noted is None:
                        failure = rail.failure
                        raise RailFailed(
                            status_text(failure.status) if failure else "it stood still"
                        )
                    break
                if self._wait(owed=noted is None):
                    answer = handshake.decode_reply(handshake.receive_body(self._socket))
                    if not isinstance(answer, Noted):
                        raise PeerGone(f"it answered a notice with {type(answer).__name__}")
                    noted = answer
                rail.nudge(usable=self.health.usable(rail.pair))
        except (OSError, HandshakeError) as error:
            raise PeerGone(str(error)) from error
        finally:
            rail.drain()
        if noted.id != notice_id:
            raise PeerGone("it answered another notice")
        return noted

    def grant(self, key: bytes) -> Granted:
        """Where a region of the owner's is.

        Raises:
            Refused: it has no such region.
            RailFailed: it can't register it.
            PeerGone: the side channel broke.
        """
        known = self._grants.get(key)
        if known is None:
            known = self._ask(Ask(self.peer.generation, key), Granted)
            self._grants[key] = known
        self._grants.move_to_end(key)
        while len(self._grants) > _MAX_GRANTS:
            self._grants.popitem(last=False)
        return known

    def forget_grant(self, key: bytes) -> None:
        """Ask again next time."""
        self._grants.pop(key, None)

    def wait(self) -> None:
        """Sleep until something in flight may have completed, or until kicked.

        Raises:
            PeerGone: the side channel closed.
        """
        self._wait(owed=False)

    def _wait(self, *, owed: bool) -> bool:
        """`wait`; whether an answer that is owed has come."""
        flying = {rail.fd: rail for rail in self.rails if rail.in_flight}
        # What completed before a queue was armed is not announced: look again first.
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
        """Nothing is owed: what can be read means that it is over.

        Raises:
            PeerGone: the side channel closed.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(0):
            return
        try:
            left = self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            raise PeerGone(str(error)) from error
        raise PeerGone("it spoke out of turn" if left else "it hung up")

    def probe(self, rail: Rail) -> None:
        """Send an empty write over a connected rail and wait until it is acknowledged.

        Raises:
            RailFailed: it is not.
            PeerGone: the side channel closed.
        """
        until = time.monotonic() + _PROBE_S
        if not rail.post([Operation(0, *rail.device.nothing, 0, 0)], write=True):
            raise RailFailed("it would not take an operation")
        while time.monotonic() < until:
            for each in rail.collect():
                if each.status == Completed.SUCCESS:
                    return
                raise RailFailed(status_text(each.status))
            self.wait()
        raise RailFailed(f"nothing came back in {_PROBE_S} s")

    def kick(self) -> None:
        """Wake the thread that uses it, from another one; it is of no use afterwards."""
        os.eventfd_write(self._wake, 1)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free all rails; the owner frees its ends."""
        for rail in self.rails:
            rail.close()
        self._socket.close()
        os.close(self._wake)

    def _ask(self, request: Request, kind: type[R]) -> R:
        try:
            answer = handshake.ask(self._socket, request)
        except (OSError, HandshakeError) as error:
            raise PeerGone(str(error)) from error
        match answer:
            case Failed():
                raise RailFailed(answer.reason)
            case Denied():
                raise Refused(answer.status, answer.detail)
        if not isinstance(answer, kind):
            raise PeerGone(f"it answered {type(request).__name__} with {type(answer).__name__}")
        return answer
