"""Copy blocks between simulated kvstores, in the steps of the live `ReplicaReader`.

One at a time at each target. The blocks are leased at their source, room is made here, and
their bytes share the network with everything else; then they are served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.messages import (
    BlocksReplicated,
    KvstoreRefused,
    ReplicateBlocks,
    ToConductor,
)
from halfmoon_simulator.cluster.network_model import NetworkModel, SimTransfer

#: The owner of leases and reservations for copies; no prefill worker has this name.
_COPIES = "copies"
#: Seconds that a conductor waits when a copy is under way already, as live.
_RETRY_S = 1.0


class CopyPeer(Protocol):
    """Answer for the kvstore at one end of a copy: see `SimKvstore`."""

    worker_id: WorkerId
    host: str

    def lease(self, owner: str, ticket: Ticket, hashes: tuple[BlockHash, ...]) -> int:
        """Pin the longest stored prefix; how many blocks that is."""
        ...

    def release(self, owner: str, ticket: Ticket) -> None:
        """End a lease."""
        ...

    def reserve(
        self,
        owner: str,
        ticket: Ticket,
        hashes: tuple[BlockHash, ...],
        parent: BlockHash | None,
    ) -> int | None:
        """Room for new blocks: how many are to be written; None: there is none."""
        ...

    def commit(self, owner: str, ticket: Ticket, n_places: int) -> None:
        """Serve the written blocks."""
        ...

    def revoke(self, owner: str, ticket: Ticket) -> None:
        """Give a reservation back."""
        ...

    def n_first(self, hashes: tuple[BlockHash, ...]) -> int:
        """Return how many of these are stored before the first that is not."""
        ...


@dataclass(eq=False, slots=True)
class _Copy:
    order: ReplicateBlocks
    source: CopyPeer
    hashes: tuple[BlockHash, ...]
    n_put: int
    transfer: SimTransfer | None = None


class SimCopier:
    """The copies that one kvstore makes."""

    def __init__(
        self,
        target: CopyPeer,
        network: NetworkModel,
        peers: Callable[[WorkerId], CopyPeer | None],
        block_bytes: int,
        answer: Callable[[ToConductor], None],
    ) -> None:
        """Idle.

        Args:
            target: where copies go.
            network: moves bytes.
            peers: a live kvstore by name.
            block_bytes: bytes of a block.
            answer: says something to the conductor.
        """
        self._target = target
        self._network = network
        self._peers = peers
        self._block_bytes = block_bytes
        self._answer = answer
        self._copy: _Copy | None = None
        #: Bytes of the copies that were made.
        self.copied_bytes = 0

    def begin(self, order: ReplicateBlocks) -> None:
        """Copy what is ordered, or say why not."""
        source = self._peers(order.source.worker_id)
        if self._copy is not None:
            self._refuse(order, "it copies other blocks just now", _RETRY_S)
            return
        if source is None:
            self._refuse(order, f"{order.source.worker_id} can't be reached")
            return
        n_found = source.lease(_COPIES, order.ticket, order.hashes)
        hashes = order.hashes[:n_found]
        n_put = self._target.reserve(_COPIES, order.ticket, hashes, order.parent)
        if n_put is None:
            source.release(_COPIES, order.ticket)
            self._refuse(order, "it has no room")
            return
        copy = self._copy = _Copy(order, source, hashes, n_put)
        n_bytes = n_put * self._block_bytes
        copy.transfer = self._network.start(
            source.host, self._target.host, n_bytes, lambda: self._on_copied(copy)
        )

    def _on_copied(self, copy: _Copy) -> None:
        self._copy = None
        self.copied_bytes += copy.n_put * self._block_bytes
        copy.source.release(_COPIES, copy.order.ticket)
        self._target.commit(_COPIES, copy.order.ticket, copy.n_put)
        n_blocks = self._target.n_first(copy.hashes)
        self._answer(BlocksReplicated(ticket=copy.order.ticket, n_blocks=n_blocks))

    def source_lost(self, source: CopyPeer) -> None:
        """Give up copies from a kvstore that is lost."""
        copy = self._copy
        if copy is not None and copy.source is source:
            self._stop(copy)
            self._target.revoke(_COPIES, copy.order.ticket)
            self._refuse(copy.order, f"{source.worker_id} is lost")

    def crash(self) -> None:
        """Release what the sources hold for copies to this kvstore, which is lost."""
        if (copy := self._copy) is not None:
            self._stop(copy)
            copy.source.release(_COPIES, copy.order.ticket)

    def _stop(self, copy: _Copy) -> None:
        assert copy.transfer is not None
        self._network.cancel(copy.transfer)
        self._copy = None

    def _refuse(self, order: ReplicateBlocks, why: str, retry_after_s: float = 0.0) -> None:
        reason = f"{self._target.worker_id}: {why}"
        refused = KvstoreRefused(ticket=order.ticket, reason=reason, retry_after_s=retry_after_s)
        self._answer(refused)
