"""A kvstore of the simulated world: the live one's `BlockCache`, with nothing in its slots.

With a disk below its memory, `SimDisk` answers in its place.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

from halfmoon_protocol.ids import BlockHash, Ticket, WorkerId
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEventBatch
from halfmoon_protocol.messages import (
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
from halfmoon_protocol.snapshots import snapshot_pages
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull, UnknownTicket
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel
from halfmoon_simulator.cluster.sim_copier import SimCopier
from halfmoon_simulator.cluster.sim_disk import LeaseAnswer, SimDisk


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
        self.disk = (
            SimDisk(self.cache, spec, block_bytes, event_queue, self._say)
            if spec.disk_bytes
            else None
        )
        #: Blocks of leases, without a disk.
        self._n_leased = 0

    def receive(self, message: ToKvstore) -> None:
        """Take a conductor's message."""
        match message:
            case SnapshotBlocks():
                for page in snapshot_pages(message, self._sequence, self.hashes()):
                    self._answer(self.worker_id, page)
            case ReplicateBlocks():
                self.copier.begin(message)
            case DropBlocks(hashes=hashes) if self.disk is not None:
                self.disk.drop(hashes)
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

    def hashes(self) -> list[BlockHash]:
        """Return all stored blocks, of memory and disk."""
        return self.cache.hashes() if self.disk is None else self.disk.tiers.hashes()

    @property
    def n_from_memory(self) -> int:
        """Leased blocks that were in memory."""
        return self._n_leased + (0 if self.disk is None else self.disk.n_from_memory)

    @property
    def n_from_disk(self) -> int:
        """Leased blocks that came from the disk first."""
        return 0 if self.disk is None else self.disk.n_from_disk

    def crash(self) -> None:
        """Lose the process: what its disk was doing has no outcome."""
        self.dead = True
        self.copier.crash()
        if self.disk is not None:
            self.disk.dead = True

    def n_first(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many of these are stored before the first that is not."""
        stored = self.cache if self.disk is None else self.disk.tiers
        missing = (i for i, block in enumerate(hashes) if block not in stored)
        return next(missing, len(hashes))

    def lease(self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash]) -> int:
        """Pin the longest prefix in memory; return how many blocks that is."""
        return len(self.cache.lease(owner, ticket, hashes, self._event_queue.now))

    def lease_tiers(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], answer: LeaseAnswer
    ) -> None:
        """Pin the longest stored prefix; `answer` takes its length, once all is in memory."""
        if self.disk is not None:
            self.disk.lease(owner, ticket, hashes, answer)
            return
        n_found = self.lease(owner, ticket, hashes)
        self._n_leased += n_found
        answer(n_found)

    def release(self, owner: str, ticket: Ticket) -> None:
        """End a lease."""
        if self.disk is not None:
            self.disk.release(owner, ticket)
        else:
            self.cache.release(owner, ticket)

    def reserve(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> int | None:
        """Reserve room for new blocks; return how many are to be written, None: no room."""
        if self.disk is not None:
            return self.disk.reserve(owner, ticket, hashes, parent)
        try:
            reserved = self.cache.reserve(owner, ticket, hashes, parent, self._event_queue.now)
        except CacheFull:
            return None
        self._say_removed(reserved.evicted)
        return len(reserved.places)

    def commit(self, owner: str, ticket: Ticket, n_places: int) -> None:
        """Serve the written blocks, and make room ahead of demand."""
        if self.disk is not None:
            self._say_stored(self.disk.commit(owner, ticket, n_places))
            self.disk.settle()
            return
        now = self._event_queue.now
        try:
            stored = self.cache.commit(owner, ticket, [0] * n_places, now)
        except UnknownTicket:
            return
        self._say_stored(stored)
        self._say_removed(self.cache.evict_to_watermark(now))

    def revoke(self, owner: str, ticket: Ticket) -> None:
        """Give a reservation back."""
        self.cache.revoke(owner, ticket)

    def _say_stored(self, blocks: Sequence[BlockHash]) -> None:
        if blocks:
            event = BlockStored(
                block_hashes=tuple(blocks), parent_block_hash=None, token_ids=(), block_size=1
            )
            self._say(event)

    def _say_removed(self, blocks: Sequence[BlockHash]) -> None:
        if blocks:
            self._say(BlockRemoved(block_hashes=tuple(blocks)))

    def _say(self, event: KvEvent) -> None:
        if self.dead:
            return
        self._sequence += 1
        self._publish(self.worker_id, KvEventBatch(self._sequence, self._event_queue.now, (event,)))

    def check(self) -> None:
        """Audit the cache."""
        if self.disk is not None:
            self.disk.check()
        else:
            self.cache.check()
