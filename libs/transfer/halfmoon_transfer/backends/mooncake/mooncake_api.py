"""Open foreign Mooncake segments, exchange messages with them, and probe them.

    engine = TransferEngine.open("here", metadata=store, backends=("mooncake",))
    mooncake = Mooncake(engine)
    there = mooncake.open("10.0.0.5:15123")
    engine.submit("write", [Piece(mine, 0, there.buffers[0].region, 0, n_bytes)])
    mooncake.notify("10.0.0.5:15123", "here", "written")

A foreign segment's buffers become regions that `submit` accepts like any other.
"""

from typing import Protocol

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.backend_interface import Backend
from halfmoon_transfer.backends.mooncake.batch_over_lane import foreign_key
from halfmoon_transfer.backends.mooncake.mooncake_backend import MooncakeBackend
from halfmoon_transfer.backends.mooncake.mooncake_records import MooncakeNotification
from halfmoon_transfer.interface import Rejected
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.regions.access import AccessRefused
from halfmoon_transfer.threads.stop_signal import StopSignal


class EngineWithBackends(Protocol):
    """A `TransferEngine`, as far as it is used here."""

    @property
    def name(self) -> str:
        """The name of its segment."""
        ...

    def backend(self, name: str) -> Backend:
        """Return one of the backends that it was opened with, or raise ValueError."""
        ...

    def add_peer(self, peer: SegmentDescriptor) -> None:
        """Make a peer known that keeps no record in the metadata store."""
        ...


class MooncakeBuffer(msgspec.Struct, frozen=True):
    """One registered buffer of a foreign segment."""

    #: The region for pieces of a transfer; its offset 0 is `address`.
    region: Region
    #: Virtual address in the foreign process.
    address: int
    #: Location as published by the owner: "cpu:0", "*" or another text.
    location: str


class MooncakeSegment(msgspec.Struct, frozen=True):
    """A snapshot of a foreign segment; open it again to see new buffers."""

    #: The name under which it was opened.
    name: str
    buffers: tuple[MooncakeBuffer, ...]

    def locate(self, address: int, length: int) -> tuple[Region, int]:
        """Return region and offset of an address in the foreign process.

        Raises:
            ValueError: no buffer holds all of these bytes.
        """
        for each in self.buffers:
            offset = address - each.address
            if offset >= 0 and length >= 0 and offset + length <= each.region.length:
                return each.region, offset
        raise ValueError(
            f"no buffer of Mooncake segment {self.name} holds {length} bytes at {address:#x}; "
            "open it again if it was registered since"
        )


class Mooncake:
    """The Mooncake functions of an engine. Methods are safe from any thread, and may block."""

    def __init__(self, engine: EngineWithBackends, *, timeout_s: float = 5.0) -> None:
        """Wrap an engine.

        Args:
            engine: an engine that was opened with the "mooncake" backend.
            timeout_s: timeout of a peer's handshake port, per call.

        Raises:
            ValueError: the engine was opened without the backend.
        """
        backend = engine.backend("mooncake")
        assert isinstance(backend, MooncakeBackend)
        self._engine = engine
        self._backend = backend
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """Name under which Mooncake peers open this engine's segment."""
        return self._backend.segment_name

    def address(self, region: Region) -> int:
        """Return the address of one of our regions, at which Mooncake peers read and write.

        Raises:
            Rejected: the region is not registered here.
        """
        try:
            return self._backend.exposed.address(region)
        except AccessRefused:
            raise Rejected(f"not a region of segment {self._engine.name} (any more)") from None

    def open(self, name: str) -> MooncakeSegment:
        """Look up a foreign segment and add it to the engine.

        `engine.release_peer` with a region's `segment` removes it again.

        Args:
            name: "host:port" of its handshake port, or its name in the metadata server.

        Raises:
            ValueError: the name is not valid.
            Lost: the segment can't be found or does not answer.
        """
        descriptor, record = self._backend.open(name, StopSignal.after(self._timeout_s))
        self._engine.add_peer(descriptor)
        buffers = tuple(
            MooncakeBuffer(
                Region(
                    descriptor.name,
                    descriptor.generation,
                    foreign_key(each.addr, each.length),
                    each.length,
                ),
                each.addr,
                each.name,
            )
            for each in record.buffers
        )
        return MooncakeSegment(name, buffers)

    def notify(self, name: str, sender: str, message: str) -> None:
        """Send a message to a segment, Halfmoon or foreign; it is delivered on return.

        Raises:
            ValueError: the name is not valid, or the message is larger than 1 MiB.
            Rejected: the peer does not accept the message.
            Lost: the segment can't be found or does not answer.
        """
        self._backend.send_message(
            name, MooncakeNotification(sender, message), StopSignal.after(self._timeout_s)
        )

    def notifications(self) -> list[MooncakeNotification]:
        """Return the messages received since the last call, oldest first."""
        return self._backend.notifications()

    def probe(self, name: str) -> None:
        """Check that a segment's handshake port answers; raises like `notify`."""
        self._backend.probe(name, StopSignal.after(self._timeout_s))
