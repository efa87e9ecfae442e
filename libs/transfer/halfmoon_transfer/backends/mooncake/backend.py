"""Over Mooncake's TCP protocol: to its Transfer Engine, and between our own engines.

The protocol has no keys, generations or checksums. Whoever reaches the data port may read and
write every registered region, by address: open this backend where the network is trusted.

A peer is known by up to two endpoints of its descriptor:

    mooncake            handshake port of one of our own engines
    mooncake-v1, -v2    data port, and the version that is spoken there

A region of one of *our own* engines has its ordinary key; where it lies we learn from that
engine's record, which is good for as long as its epoch lasts (see `server`). A region of a
*foreign* segment has address and length for a key: it is refused when no such buffer is
registered there any more, but another buffer at the same address can't be told from it.

Slices that touch are moved by one request. Damage that `faults` asks for is not done here:
without a checksum nobody would notice.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar

from halfmoon_metadata.store import MetadataError
from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.interface import Errand, Gauges, Home, refusal
from halfmoon_transfer.backends.mooncake import handshake, records
from halfmoon_transfer.backends.mooncake.client import AddressRefused, Lane, dial
from halfmoon_transfer.backends.mooncake.exposed import Exposed
from halfmoon_transfer.backends.mooncake.frames import FrameError, Version
from halfmoon_transfer.backends.mooncake.handshake import Refusal
from halfmoon_transfer.backends.mooncake.listener import Listener
from halfmoon_transfer.backends.mooncake.records import (
    Notification,
    RecordError,
    RpcRecord,
    SegmentRecord,
)
from halfmoon_transfer.backends.mooncake.registry import Registry
from halfmoon_transfer.backends.mooncake.server import DataPort, HandshakePort
from halfmoon_transfer.backends.tcp.addresses import advertised, join, split
from halfmoon_transfer.descriptor import Endpoint, SegmentDescriptor
from halfmoon_transfer.interface import Lost, Rejected
from halfmoon_transfer.plan import APPLIED, Fate, Outcome, Slice
from halfmoon_transfer.regions import Status
from halfmoon_transfer.stop import StopSignal

_log = logging.getLogger(__name__)
_DATA: dict[str, Version] = {"mooncake-v2": 2, "mooncake-v1": 1}
#: Bytes moved by one request at the most, when slices touch.
_RUN_BYTES = 4 * 1024 * 1024
#: How often a peer's regions may change under one batch.
_MAX_BINDS = 5
_ADDRESS = struct.Struct("<QQ")
T = TypeVar("T")


class _Stale(Exception):
    """Another start of the segment answers; the text says which."""


def foreign_key(address: int, length: int) -> bytes:
    """The key of a region in a foreign segment."""
    return _ADDRESS.pack(address, length)


class MooncakeBackend:
    """Both sides of the protocol."""

    name = "mooncake"

    def __init__(self, home: Home) -> None:
        settings = home.settings
        self.slice_bytes = settings.slice_bytes
        self._label = f"halfmoon-transfer-{home.name}-mooncake"
        self._connect_timeout_s = settings.connect_timeout_s
        self._max_idle = settings.max_idle_connections
        self._lock = threading.Lock()
        #: Connections that nobody uses now, with whom they lead to; the oldest first.
        self._idle: list[tuple[SegmentDescriptor, Lane]] = []
        self._n_busy = 0
        #: Foreign segments that were opened, by what they were opened as.
        self._foreign: dict[str, SegmentDescriptor] = {}
        self._regions = home.regions
        self.exposed = Exposed(home.regions)
        self._data = DataPort(self.exposed)
        self._handshake = HandshakePort(self.record, settings.mooncake.max_notifications)
        with ExitStack() as undo:
            self._data_listener = self._listen(
                home, "data", self._data.serve, settings.mooncake.data_port, undo
            )
            self._data_endpoint = _advertised(home, self._data_listener.port)
            # A peer may ask as soon as the second one listens: all it needs is there.
            self._registry_ready = threading.Event()
            self._handshake_listener = self._listen(
                home, "handshake", self._shake, settings.mooncake.handshake_port, undo
            )
            self._handshake_endpoint = _advertised(home, self._handshake_listener.port)
            host, port = split(self._handshake_endpoint.address, 0)
            self._registry = Registry(settings.mooncake, home.name, RpcRecord(host, port))
            undo.callback(self._registry.withdraw)
            self._registry_ready.set()
            self._registry.announce_rpc()
            self._announce()
            home.regions.watch(self._announce)
            undo.pop_all()

    def _listen(
        self,
        home: Home,
        what: str,
        serve: Callable[[socket.socket], None],
        port: int,
        undo: ExitStack,
    ) -> Listener:
        listener = Listener(
            serve,
            bind=home.bind,
            port=port,
            label=f"{self._label}-{what}",
            max_connections=home.settings.max_connections,
            stall_timeout_s=home.settings.stall_timeout_s,
        )
        undo.callback(listener.close)
        return listener

    def _shake(self, sock: socket.socket) -> None:
        if self._registry_ready.wait(self._connect_timeout_s):
            self._handshake.serve(sock)

    # What others see of us.

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """Both ports."""
        return {"mooncake": self._handshake_endpoint, "mooncake-v2": self._data_endpoint}

    @property
    def segment_name(self) -> str:
        """What Mooncake peers open us as."""
        return self._registry.name

    def record(self) -> SegmentRecord:
        """Our segment record as of now."""
        host, port = split(self._data_endpoint.address, 0)
        return self.exposed.record(self._registry.name, host, port)

    def _announce(self) -> None:
        if not self._registry.is_p2p:
            with self._registry.lock:
                self._registry.announce(self.record())

    def revoke(self, key: bytes) -> None:
        """Peers of ours must ask anew where regions are; the others see it in our record."""
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
        """Cut the connections that access the region now."""
        for sock in self._data.accessing(key):
            self._data_listener.hang_up(sock)

    # Carrying.

    def reaches(self, peer: SegmentDescriptor) -> bool:
        """Whether the peer listens."""
        return any(each in peer.endpoints for each in _DATA)

    def carry(self, errand: Errand) -> Sequence[Outcome]:
        """Move a batch, over one connection as long as nothing is refused."""
        outcomes: list[Outcome | None] = [None] * len(errand.batch.slices)
        failure: Outcome | None = None
        n_binds = 0
        while failure is None and None in outcomes and not errand.stop.stopped:
            if n_binds == _MAX_BINDS and _is_ours(errand.peer):
                failure = Outcome(Fate.LOST, f"{_where(errand.peer)}: its regions keep changing")
            else:
                failure = self._carry(errand, outcomes, fresh=n_binds > 0)
            n_binds += 1
        missing = failure or Outcome(Fate.LOST, "stopped")
        return [outcome or missing for outcome in outcomes]

    def _carry(
        self, errand: Errand, outcomes: list[Outcome | None], *, fresh: bool
    ) -> Outcome | None:
        """Move what has no outcome yet over one connection.

        Returns:
            What happens to the rest, or None when there is no rest or it may go on.
        """
        where = _where(errand.peer)
        try:
            lane = self._take(errand.peer, errand.stop, fresh=fresh)
        except _Stale as stale:
            return Outcome(Fate.STALE, f"{where}: {stale}")
        except (OSError, FrameError, RecordError, AddressRefused) as error:
            return Outcome(Fate.LOST, f"{where}: {error}")
        reused = lane.used
        lane.used = True
        errand.stop.doing = f"waiting for {where}"
        whole = False
        try:
            with errand.stop.kicking(lane.kick):
                whole = _move(lane, errand, outcomes, trusted=not reused)
        except (OSError, FrameError) as error:
            if reused:
                self._drop_idle(errand.peer.name)
            return Outcome(Fate.LOST, f"{where}: {error}{_hint(errand.peer)}")
        finally:
            if whole and not errand.stop.stopped:
                self._put_back(errand.peer, lane)
            else:
                self._discard(lane)
        return None

    # Connections.

    def _take(self, peer: SegmentDescriptor, stop: StopSignal, *, fresh: bool) -> Lane:
        """An idle connection to this peer, or a new one."""
        with self._lock:
            self._n_busy += 1
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == peer and not fresh:
                    return self._idle.pop(index)[1]
        # None to this start of the peer, or not to be trusted: neither are the others.
        self._drop_idle(peer.name)
        try:
            return self._bind(peer, stop) if _is_ours(peer) else self._dial(peer, stop)
        except BaseException:
            with self._lock:
                self._n_busy -= 1
            raise

    def _dial(self, peer: SegmentDescriptor, stop: StopSignal) -> Lane:
        stop.doing = f"connecting to {_where(peer)}"
        name, endpoint = _data_endpoint(peer)
        host, port = split(endpoint.address, 0)
        lane = Lane(dial(host, port, self._connect_timeout_s, stop), _DATA[name])
        if not _is_ours(peer):
            lane.ready()
        return lane

    def _bind(self, peer: SegmentDescriptor, stop: StopSignal) -> Lane:
        """A connection to one of our own engines, and what its buffers are."""
        host, port = split(peer.endpoints["mooncake"].address, 0)
        for _ in range(_MAX_BINDS):
            record = self._ask(
                host, port, stop, lambda sock: handshake.ask_record(sock, self.record())
            )
            mark = record.halfmoon
            if mark is None:
                raise FrameError("it is a Mooncake engine, and not the segment that it was")
            if mark.generation != peer.generation:
                raise _Stale(f"it is of generation {mark.generation} now")
            if mark.segment != peer.name:
                raise FrameError(f"this is segment {mark.segment:.200}")
            lane = self._dial(peer, stop)
            try:
                with stop.kicking(lane.kick):
                    lane.bind(_epoch(mark.epoch))
                lane.ready()
            except AddressRefused:
                # A region was taken back between the two questions.
                lane.close()
                continue
            except BaseException:
                lane.close()
                raise
            lane.buffers = {
                each.halfmoon.key_hash: each for each in record.buffers if each.halfmoon is not None
            }
            return lane
        raise FrameError("its regions keep changing")

    def _ask(self, host: str, port: int, stop: StopSignal, ask: Callable[[socket.socket], T]) -> T:
        """One handshake; a peer that says nothing is no better than one that does not accept."""
        sock = dial(host, port, self._connect_timeout_s, stop)
        with sock, stop.kicking(Lane(sock, 2).kick):
            return ask(sock)

    def _put_back(self, peer: SegmentDescriptor, lane: Lane) -> None:
        with self._lock:
            self._n_busy -= 1
            self._idle.append((peer, lane))
            surplus = self._idle[: max(0, len(self._idle) - self._max_idle)]
            del self._idle[: len(surplus)]
        for _, old in surplus:
            old.close()

    def _discard(self, lane: Lane) -> None:
        with self._lock:
            self._n_busy -= 1
        lane.close()

    def _drop_idle(self, segment: str) -> None:
        with self._lock:
            dropped = [lane for peer, lane in self._idle if peer.name == segment]
            self._idle = [(peer, lane) for peer, lane in self._idle if peer.name != segment]
        for lane in dropped:
            lane.close()

    # Foreign segments; `face` is what users see of this.

    def open(self, name: str, stop: StopSignal) -> tuple[SegmentDescriptor, SegmentRecord]:
        """Look up a foreign segment: how it is reached and what its buffers are.

        Raises:
            ValueError: a name that can't be one.
            Lost: it can't be found or does not answer.
        """
        try:
            record, host = self._find(name, stop)
        except (OSError, FrameError, RecordError) as error:
            raise Lost(f"Mooncake segment {name}: {error}") from error
        version: Version = 2 if record.tcp_proto_version >= 2 else 1
        address = join(record.tcp_data_host or host, record.tcp_data_port)
        endpoints = {f"mooncake-v{version}": Endpoint(address, "its Mooncake record")}
        with self._lock:
            known = self._foreign.get(name)
            generation = 1 if known is None else known.generation
            if known is not None and known.endpoints != endpoints:
                # Another data port: it was started anew, and old regions mean nothing.
                generation += 1
            found = SegmentDescriptor(f"mooncake:{name}", generation, "", endpoints)
            self._foreign[name] = found
        return found, record

    def _find(self, name: str, stop: StopSignal) -> tuple[SegmentRecord, str]:
        if not self._registry.is_p2p:
            record = self._registry.record(name)
            return record, record.tcp_data_host or self._registry.rpc_address(name)[0]
        host, port = self._registry.rpc_address(name)
        own = self.record()
        return self._ask(host, port, stop, lambda sock: handshake.ask_record(sock, own)), host

    def notify(self, name: str, notification: Notification, stop: StopSignal) -> None:
        """Leave a message at a segment's handshake port.

        Raises:
            ValueError: a name that can't be one, or a message that is too long.
            Rejected: the peer does not take it.
            Lost: it can't be found or does not answer.
        """
        self._say(name, stop, lambda sock: handshake.ask_notify(sock, notification))

    def probe(self, name: str, stop: StopSignal) -> None:
        """Ask a segment's handshake port for a sign of life; raises like `notify`."""
        self._say(name, stop, handshake.ask_probe)

    def _say(self, name: str, stop: StopSignal, ask: Callable[[socket.socket], None]) -> None:
        try:
            host, port = self._registry.rpc_address(name)
            self._ask(host, port, stop, ask)
        except Refusal as refused:
            raise Rejected(f"Mooncake segment {name}: {refused!s:.500}") from None
        except (OSError, FrameError, RecordError) as error:
            raise Lost(f"Mooncake segment {name}: {error}") from error

    def notifications(self) -> list[Notification]:
        """The messages that have come since last asked."""
        return self._handshake.take()

    # The rest of a backend.

    def view(self, peer: SegmentDescriptor, key: bytes) -> memoryview | None:
        """There is none over a wire."""
        return None

    def forget(self, segment: str) -> None:
        """Close idle connections to this peer."""
        self._drop_idle(segment)

    def gauges(self) -> Gauges:
        """Connections of both sides."""
        with self._lock:
            n_dialled = len(self._idle) + self._n_busy
        listeners = (self._data_listener, self._handshake_listener)
        return Gauges(
            n_connections=n_dialled + sum(each.n_connections for each in listeners),
            n_malformed=sum(each.n_malformed for each in listeners),
        )

    def close(self) -> None:
        """Withdraw our records, hang up on everybody and stop listening."""
        self._regions.unwatch(self._announce)
        self._registry.withdraw()
        with self._lock:
            idle, self._idle = self._idle, []
        for _, lane in idle:
            lane.close()
        self._handshake_listener.close()
        self._data_listener.close()


# Moving.


def _move(lane: Lane, errand: Errand, outcomes: list[Outcome | None], *, trusted: bool) -> bool:
    """Move what has no outcome yet; False when the connection is of no more use.

    Args:
        lane: a connection to the peer.
        errand: the batch.
        outcomes: filled in as slices are done.
        trusted: whether what the lane knows of our own engine's buffers was just asked.

    Raises:
        FrameError, OSError: the connection broke; slices without an outcome are lost.
    """
    ours = _is_ours(errand.peer)
    addresses: dict[int, int] = {}
    for index, each in enumerate(errand.batch.slices):
        if outcomes[index] is not None:
            continue
        found = _find_buffer(lane, errand, each) if ours else _foreign_address(each)
        if isinstance(found, int):
            addresses[index] = found
        elif trusted:
            outcomes[index] = found
        else:
            # It may be a new region; what this connection knows is from an earlier time.
            return False
    for run in _runs(addresses, errand):
        if errand.stop.stopped:
            return False
        local = [errand.local[index] for index in run]
        try:
            if errand.batch.op == "write":
                lane.write(addresses[run[0]], local)
            else:
                lane.read(addresses[run[0]], local)
        except AddressRefused:
            if not ours:
                for index in run:
                    outcomes[index] = _refused(errand, errand.batch.slices[index])
            return False
        for index in run:
            outcomes[index] = APPLIED
    return True


def _find_buffer(lane: Lane, errand: Errand, each: Slice) -> int | Outcome:
    """Where a slice lies in one of our own engines, or why it may not be accessed."""
    buffer = lane.buffers.get(records.key_hash(each.remote.key))
    if buffer is None or buffer.halfmoon is None:
        return refusal(errand.batch, each, Status.UNKNOWN_KEY, 0)
    if each.remote_offset + each.length > buffer.length:
        return refusal(errand.batch, each, Status.OUT_OF_BOUNDS, buffer.length)
    if errand.batch.op == "write" and buffer.halfmoon.read_only:
        return refusal(errand.batch, each, Status.READ_ONLY, 0)
    return buffer.addr + each.remote_offset


def _foreign_address(each: Slice) -> int | Outcome:
    address, _ = _ADDRESS.unpack(each.remote.key)
    if address + each.remote_offset + each.length > 2**64:
        return Outcome(Fate.REJECTED, f"{address:#x} and {each.remote_offset} is no address")
    return int(address + each.remote_offset)


def _refused(errand: Errand, each: Slice) -> Outcome:
    address, length = _ADDRESS.unpack(each.remote.key)
    return Outcome(
        Fate.REJECTED,
        f"{errand.batch.op} of {each.length} bytes at {address + each.remote_offset:#x}: segment "
        f"{errand.peer.name} has no buffer that holds them, such as the {length} bytes at "
        f"{address:#x} (any more)",
    )


def _runs(addresses: dict[int, int], errand: Errand) -> Iterator[Sequence[int]]:
    """Indices of slices that touch at the far side, in runs of one request each."""
    run: list[int] = []
    n_bytes = 0
    previous: tuple[int, Region] | None = None
    for index, address in addresses.items():
        each = errand.batch.slices[index]
        if run and ((address, each.remote) != previous or n_bytes + each.length > _RUN_BYTES):
            yield run
            run, n_bytes = [], 0
        run.append(index)
        n_bytes += each.length
        previous = (address + each.length, each.remote)
    if run:
        yield run


# Peers.


def _is_ours(peer: SegmentDescriptor) -> bool:
    return "mooncake" in peer.endpoints


def _data_endpoint(peer: SegmentDescriptor) -> tuple[str, Endpoint]:
    return next((name, peer.endpoints[name]) for name in _DATA if name in peer.endpoints)


def _where(peer: SegmentDescriptor) -> str:
    name, endpoint = _data_endpoint(peer)
    return f"segment {peer.name} at {endpoint.address} ({name}; {endpoint.origin})"


def _hint(peer: SegmentDescriptor) -> str:
    if _data_endpoint(peer)[0] == "mooncake-v1":
        return "; version 1 also refuses addresses in this way"
    return ""


def _epoch(text: str) -> int:
    try:
        epoch = int(text, 16)
    except ValueError:
        epoch = -1
    if not 0 <= epoch < 2**64:
        raise FrameError(f"an epoch of {text!r:.100}")
    return epoch


def _advertised(home: Home, port: int) -> Endpoint:
    """What peers dial: the engine's host, with a port of our own."""
    host = home.advertise if home.advertise is None else split(home.advertise, 1)[0]
    if host is not None and ":" in host:
        host = f"[{host}]"
    return advertised(home.bind, port, host)
