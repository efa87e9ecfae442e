"""What an engine with the "mooncake" backend can do besides transfers.

    engine = TransferEngine.open("here", metadata=store, backends=("mooncake",))
    mooncake = Mooncake(engine)
    there = mooncake.open("10.0.0.5:15123")
    engine.submit("write", [Piece(mine, 0, there.buffers[0].region, 0, n_bytes)])
    mooncake.notify("10.0.0.5:15123", "here", "written")

A foreign segment's buffers become regions of ours, which `submit` takes like any other.
"""

import msgspec

from halfmoon_protocol.regions import Region
from halfmoon_transfer.backends.mooncake.batch_over_lane import foreign_key
from halfmoon_transfer.backends.mooncake.mooncake_backend import MooncakeBackend
from halfmoon_transfer.backends.mooncake.mooncake_records import MooncakeNotification
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Rejected
from halfmoon_transfer.regions.region_table import AccessRefused
from halfmoon_transfer.threads.stop_signal import StopSignal


class MooncakeBuffer(msgspec.Struct, frozen=True):
    """One buffer that a foreign segment has registered."""

    #: For pieces of a transfer; offset 0 is `address`.
    region: Region
    #: In the foreign process.
    address: int
    #: "cpu:0", "*", or what else the owner says.
    location: str


class MooncakeSegment(msgspec.Struct, frozen=True):
    """A foreign segment as it was when it was opened; open it again to see new buffers."""

    #: What it was opened as.
    name: str
    buffers: tuple[MooncakeBuffer, ...]

    def locate(self, address: int, length: int) -> tuple[Region, int]:
        """The region and offset of an address that was learnt some other way.

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
    """An engine among Mooncake's. Methods are safe from any thread, and may block."""

    def __init__(self, engine: TransferEngine, *, timeout_s: float = 5.0) -> None:
        """Look at an engine from this side.

        Args:
            engine: one that was opened with the "mooncake" backend.
            timeout_s: patience with a peer's handshake port, per call.

        Raises:
            ValueError: it was opened without.
        """
        backend = engine.backend("mooncake")
        assert isinstance(backend, MooncakeBackend)
        self._engine = engine
        self._backend = backend
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """What Mooncake peers open this engine's segment as."""
        return self._backend.segment_name

    def address(self, region: Region) -> int:
        """Where one of our regions begins: what a Mooncake peer reads and writes at.

        Raises:
            Rejected: it is not registered here.
        """
        try:
            return self._backend.exposed.address(region)
        except AccessRefused:
            raise Rejected(f"not a region of segment {self._engine.name} (any more)") from None

    def open(self, name: str) -> MooncakeSegment:
        """Look up a foreign segment and make it known to the engine.

        `engine.release_peer` with a region's `segment` forgets it again.

        Args:
            name: "host:port" of its handshake port, or its name in the metadata server.

        Raises:
            ValueError: a name that can't be one.
            Lost: it can't be found or does not answer.
        """
        descriptor, record = self._backend.open(name, StopSignal.after(self._timeout_s))
        self._engine.introduce(descriptor)
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
        """Leave a message at a segment, ours or foreign; it is there when this returns.

        Raises:
            ValueError: a name that can't be one, or a message beyond 1 MiB.
            Rejected: the peer does not take it.
            Lost: it can't be found or does not answer.
        """
        self._backend.leave_message(
            name, MooncakeNotification(sender, message), StopSignal.after(self._timeout_s)
        )

    def notifications(self) -> list[MooncakeNotification]:
        """Messages that were left here since last asked, oldest first."""
        return self._backend.notifications()

    def probe(self, name: str) -> None:
        """Return if a segment's handshake port gives a sign of life; raises like `notify`."""
        self._backend.probe(name, StopSignal.after(self._timeout_s))
