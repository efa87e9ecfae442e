"""Keep the connections to owners of this host, and what they revoke while batches are carried."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from halfmoon_transfer.backends.backend_interface import refusal_outcome
from halfmoon_transfer.metadata.descriptor import SegmentDescriptor
from halfmoon_transfer.planning.transfer_plan import Batch, OutcomeKind, SliceOutcome
from halfmoon_transfer.regions.access import AccessStatus


class OwnerConnection(Protocol):
    """A `UnixPeer`, as far as it is used here."""

    address: str

    def require_alive(self) -> None:
        """Raise `UnixPeerGone` if the owner hung up."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


Peer = TypeVar("Peer", bound=OwnerConnection)


class RegionCache(Protocol):
    """Memory of owners that is held here, by owner's address and region key."""

    def drop(self, place: tuple[str, bytes]) -> None:
        """Let go of one region."""
        ...

    def drop_owner(self, address: str) -> None:
        """Let go of all regions of one owner."""
        ...


class UnixPeerTable(Generic[Peer]):
    """One connection to the current start of each owner. Methods are safe from any thread."""

    def __init__(
        self,
        path: str,
        connect: Callable[[str, Callable[[bytes], None]], Peer],
        held: RegionCache,
    ) -> None:
        """Start without connections.

        Args:
            path: the backend's name, under which owners publish their address.
            connect: connects to an address; its second argument is called with revoked keys.
            held: what is dropped when a region or an owner is gone.
        """
        self._path = path
        self._connect = connect
        self._held = held
        self._lock = threading.Lock()
        #: By segment name.
        self._peers: dict[str, Peer] = {}
        #: For each batch being carried: the keys that were revoked since it began.
        self._batches: list[set[bytes]] = []

    def __len__(self) -> int:
        return len(self._peers)

    def known(self, segment: str) -> Peer | None:
        """Return the connection to a segment, if there is one."""
        return self._peers.get(segment)

    def get(self, wanted: SegmentDescriptor) -> Peer:
        """Return the connection to this owner, alive a moment ago; connect if there is none.

        Raises:
            UnixPeerGone: the owner is gone.
        """
        address = wanted.endpoints[self._path].address
        with self._lock:
            peer = self._peers.get(wanted.name)
        if peer is not None and peer.address != address:
            self._drop(wanted.name, peer.address)
            peer = None
        if peer is not None:
            peer.require_alive()
            return peer
        made = self._connect(address, lambda key: self._on_revoked(address, key))
        with self._lock:
            peer = self._peers.setdefault(wanted.name, made)
        if peer is not made:
            made.close()
        return peer

    def drop(self, wanted: SegmentDescriptor) -> None:
        """Close the connection to this start of an owner, which is gone."""
        self._drop(wanted.name, wanted.endpoints[self._path].address)

    def forget(self, segment: str) -> None:
        """Hang up on an owner and let go of its memory."""
        peer = self._peers.get(segment)
        if peer is not None:
            self._drop(segment, peer.address)

    def close(self) -> None:
        """Hang up on all owners."""
        for segment in list(self._peers):
            self.forget(segment)

    def begin_batch(self) -> set[bytes]:
        """Return a set that receives the keys revoked from now on, until `end_batch`."""
        revoked: set[bytes] = set()
        with self._lock:
            self._batches.append(revoked)
        return revoked

    def end_batch(self, revoked: set[bytes]) -> None:
        """Stop collecting revoked keys in a set."""
        with self._lock:
            self._batches = [each for each in self._batches if each is not revoked]

    def _on_revoked(self, address: str, key: bytes) -> None:
        # First the batches: one that is about to keep the region's memory looks there afterwards.
        with self._lock:
            for revoked in self._batches:
                revoked.add(key)
        self._held.drop((address, key))

    def _drop(self, segment: str, address: str) -> None:
        with self._lock:
            peer = self._peers.get(segment)
            if peer is not None and peer.address == address:
                del self._peers[segment]
            else:
                peer = None
        self._held.drop_owner(address)
        if peer is not None:
            peer.close()


def refuse_revoked(
    batch: Batch, outcomes: Sequence[SliceOutcome], revoked: set[bytes]
) -> Sequence[SliceOutcome]:
    """Refuse the slices of a batch whose regions were revoked while it was carried."""
    return [
        refusal_outcome(batch, each, AccessStatus.UNKNOWN_KEY, 0)
        if each.remote.key in revoked and outcome.kind is OutcomeKind.APPLIED
        else outcome
        for each, outcome in zip(batch.slices, outcomes, strict=True)
    ]
