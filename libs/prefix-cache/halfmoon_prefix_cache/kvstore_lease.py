"""Name blocks that a kvstore holds for a reader."""

from dataclasses import dataclass

from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.messages import KvstoreAddress, Place
from halfmoon_protocol.regions import Region
from halfmoon_runtime.kvstore_clients import KvstoreClient


@dataclass(frozen=True)
class KvstoreLease:
    """Blocks that a kvstore holds still while they are read."""

    kvstore: KvstoreClient
    address: KvstoreAddress
    ticket: Ticket
    region: Region
    places: tuple[Place, ...]
    expires_s: float
    #: Of the blocks, those that were not in the kvstore's memory when they were asked for.
    n_from_disk: int = 0

    @property
    def checksums(self) -> tuple[int, ...]:
        """Of the blocks, in prefix order."""
        return tuple(place.checksum for place in self.places)
