"""Dial connections to peers, bind them to an epoch, and keep idle ones."""

import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from halfmoon_transfer.backends.addresses import split_address
from halfmoon_transfer.backends.mooncake import mooncake_handshake, mooncake_peers
from halfmoon_transfer.backends.mooncake.mooncake_frames import MooncakeFrameError
from halfmoon_transfer.backends.mooncake.mooncake_lane import AddressRefused, MooncakeLane
from halfmoon_transfer.backends.mooncake.mooncake_records import SegmentRecord
from halfmoon_transfer.backends.socket_io import connect_any
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.threads.stop_signal import StopSignal

#: Tries to bind a connection while the peer's regions keep changing. A try is lost to each region
#: that goes in its few milliseconds: five in a row were on a busy machine.
MAX_BINDS = 50
T = TypeVar("T")


class StaleSegment(Exception):
    """Another start of the segment answered; the text says which."""


class MooncakeLanePool:
    """The connections that one engine has dialled. Safe from any thread."""

    def __init__(
        self, own_record: Callable[[], SegmentRecord], *, connect_timeout_s: float, max_idle: int
    ) -> None:
        self._own_record = own_record
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._lock = threading.Lock()
        #: Unused connections with their peers, oldest first.
        self._idle: list[tuple[SegmentDescriptor, MooncakeLane]] = []
        self._n_busy = 0

    @property
    def n_connections(self) -> int:
        """Number of open connections."""
        with self._lock:
            return len(self._idle) + self._n_busy

    def take(self, peer: SegmentDescriptor, stop: StopSignal, *, fresh: bool) -> MooncakeLane:
        """Take an idle connection to this peer, or with `fresh` a new one, for one thread.

        Raises:
            StaleSegment: another start of this segment answers.
            ValueError: another segment or another program answers.
            OSError: the peer does not answer.
        """
        with self._lock:
            self._n_busy += 1
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == peer and not fresh:
                    return self._idle.pop(index)[1]
        # No connection to this start of the peer can be trusted: close all others too.
        self.drop_idle(peer.name)
        try:
            return (
                self._bind(peer, stop)
                if mooncake_peers.is_halfmoon(peer)
                else self._dial(peer, stop)
            )
        except BaseException:
            with self._lock:
                self._n_busy -= 1
            raise

    def _dial(self, peer: SegmentDescriptor, stop: StopSignal) -> MooncakeLane:
        stop.doing = f"connecting to {mooncake_peers.describe_peer(peer)}"
        name, endpoint = mooncake_peers.data_endpoint(peer)
        host, port = split_address(endpoint.address, 0)
        lane = MooncakeLane(self._connect(host, port, stop), mooncake_peers.VERSIONS[name])
        if not mooncake_peers.is_halfmoon(peer):
            lane.make_ready()
        return lane

    def _bind(self, peer: SegmentDescriptor, stop: StopSignal) -> MooncakeLane:
        """Dial a Halfmoon engine, read its buffers and bind the connection to its epoch."""
        host, port = split_address(peer.endpoints["mooncake"].address, 0)
        for _ in range(MAX_BINDS):
            record = self.ask(
                host,
                port,
                stop,
                lambda sock: mooncake_handshake.exchange_records(sock, self._own_record()),
            )
            mark = record.halfmoon
            if mark is None:
                raise MooncakeFrameError("it is a Mooncake engine, and not the segment that it was")
            if mark.generation != peer.generation:
                raise StaleSegment(f"it is of generation {mark.generation} now")
            if mark.segment != peer.name:
                raise MooncakeFrameError(f"this is segment {mark.segment:.200}")
            lane = self._dial(peer, stop)
            try:
                with stop.calling_on_stop(lane.abort):
                    lane.bind(_epoch(mark.epoch))
                lane.make_ready()
            except AddressRefused:
                # A region was unregistered between the two requests.
                lane.close()
                continue
            except BaseException:
                lane.close()
                raise
            lane.buffers = {
                each.halfmoon.key_hash: each for each in record.buffers if each.halfmoon is not None
            }
            return lane
        raise MooncakeFrameError("its regions keep changing")

    def put_back(self, peer: SegmentDescriptor, lane: MooncakeLane) -> None:
        """Return a connection to the pool, for the next batch."""
        with self._lock:
            self._n_busy -= 1
            self._idle.append((peer, lane))
            surplus = self._idle[: max(0, len(self._idle) - self._max_idle)]
            del self._idle[: len(surplus)]
        for _, old in surplus:
            old.close()

    def discard(self, lane: MooncakeLane) -> None:
        """Close a taken connection."""
        with self._lock:
            self._n_busy -= 1
        lane.close()

    def drop_idle(self, segment: str) -> None:
        """Close the idle connections to this peer."""
        with self._lock:
            dropped = [lane for peer, lane in self._idle if peer.name == segment]
            self._idle = [(peer, lane) for peer, lane in self._idle if peer.name != segment]
        for lane in dropped:
            lane.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, lane in idle:
            lane.close()

    def ask(self, host: str, port: int, stop: StopSignal, ask: Callable[[socket.socket], T]) -> T:
        """Dial a handshake port and run one exchange; a silent peer counts as unreachable.

        Raises:
            OSError: the peer does not answer. Errors of `ask` are passed on.
        """
        sock = self._connect(host, port, stop)
        with sock, stop.calling_on_stop(MooncakeLane(sock, 2).abort):
            return ask(sock)

    def _connect(self, host: str, port: int, stop: StopSignal) -> socket.socket:
        timeout_s = min(self._connect_timeout_s, stop.remaining_s())
        return connect_any(host, port, time.monotonic() + timeout_s, stop)


def _epoch(text: str) -> int:
    try:
        epoch = int(text, 16)
    except ValueError:
        epoch = -1
    if not 0 <= epoch < 2**64:
        raise MooncakeFrameError(f"an epoch of {text!r:.100}")
    return epoch
