"""A kvstore of the simulated world: the live one's `BlockCache`, with nothing in its slots."""

from collections.abc import Callable, Sequence
from typing import assert_never

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEventBatch
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    Cancel,
    CommitBlocks,
    DropBlocks,
    Hello,
    LeaseBlocks,
    ReleaseLease,
    RenewLease,
    ReplicateBlocks,
    ReserveBlocks,
    RevokeBlocks,
    SnapshotBlocks,
    ToConductor,
    ToKvstore,
    Unwelcome,
    VerifyBlocks,
)
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull, UnknownTicket
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_copier import SimCopier


class SimKvstore:
    """Answers prefill workers at once; conductors hear of it by KV events, as they do live."""

    def __init__(
        self,
        worker_id: WorkerId,
        host: str,
        spec: ClusterSpec,
        n_slots: int,
        event_queue: EventQueue,
        network: NetworkModel,
        block_bytes: int,
        peers: "Callable[[WorkerId], SimKvstore | None]",
        publish: Callable[[WorkerId, KvEventBatch], None],
        answer: Callable[[WorkerId, ToConductor], None],
    ) -> None:
        self.worker_id = worker_id
        self.host = host
        self.dead = False
        self._event_queue = event_queue
        self._publish = publish
        self._answer = answer
        self._sequence = -1
        self.copier = SimCopier(
            self, network, peers, block_bytes, lambda message: answer(worker_id, message)
        )
        self.cache = BlockCache(
            n_slots,
            policy=spec.eviction,
            high_watermark=spec.high_watermark,
            low_watermark=spec.low_watermark,
            reservation_ttl_s=spec.reservation_ttl_s,
            lease_ttl_s=spec.lease_ttl_s,
        )

    def receive(self, message: ToKvstore) -> None:
        """Take a conductor's message."""
        match message:
            case SnapshotBlocks():
                hashes = tuple(self.cache.hashes())
                self._answer(self.worker_id, BlocksSnapshot(sequence=self._sequence, hashes=hashes))
            case ReplicateBlocks():
                self.copier.begin(message)
            case DropBlocks(hashes=hashes):
                self._say_removed([block for block in hashes if self.cache.evict(block)])
            case (
                ReserveBlocks()
                | CommitBlocks()
                | RevokeBlocks()
                | LeaseBlocks()
                | RenewLease()
                | ReleaseLease()
                | VerifyBlocks()
                | Cancel()
                | Hello()
                | Unwelcome()
            ):
                raise AssertionError(f"{self.worker_id} got {message!r}")
            case _:
                assert_never(message)

    def n_first(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of these are stored before the first that is not."""
        missing = (i for i, block in enumerate(hashes) if block not in self.cache)
        return next(missing, len(hashes))

    def lease(self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash]) -> int:
        """Pin the longest stored prefix; return how many blocks that is."""
        return len(self.cache.lease(owner, ticket, hashes, self._event_queue.now))

    def release(self, owner: str, ticket: Ticket) -> None:
        """End a lease."""
        self.cache.release(owner, ticket)

    def reserve(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> int | None:
        """Reserve room for new blocks; return how many are to be written, None: no room."""
        try:
            reserved = self.cache.reserve(owner, ticket, hashes, parent, self._event_queue.now)
        except CacheFull:
            return None
        self._say_removed(reserved.evicted)
        return len(reserved.places)

    def commit(self, owner: str, ticket: Ticket, n_places: int) -> None:
        """Serve the written blocks, and make room ahead of demand."""
        now = self._event_queue.now
        try:
            stored = self.cache.commit(owner, ticket, [0] * n_places, now)
        except UnknownTicket:
            return
        if stored:
            event = BlockStored(
                block_hashes=tuple(stored), parent_block_hash=None, token_ids=(), block_size=1
            )
            self._say(event)
        self._say_removed(self.cache.evict_to_watermark(now))

    def revoke(self, owner: str, ticket: Ticket) -> None:
        """Give a reservation back."""
        self.cache.revoke(owner, ticket)

    def _say_removed(self, blocks: Sequence[BlockHash]) -> None:
        if blocks:
            self._say(BlockRemoved(block_hashes=tuple(blocks)))

    def _say(self, event: KvEvent) -> None:
        self._sequence += 1
        self._publish(self.worker_id, KvEventBatch(self._sequence, self._event_queue.now, (event,)))

    def check(self) -> None:
        """Audit the cache."""
        self.cache.check()
