"""The disk below a simulated kvstore's memory: the live `TieredCache`, with modelled I/O.

Reads and writes under way share the disk's bandwidth equally, and each begins after the disk's
latency. No operation fails, and erasing a slot takes no time.
"""

from collections.abc import Callable, Sequence
from functools import partial

from halfmoon_protocol.ids import BlockHash, Ticket
from halfmoon_protocol.kv_events import BlockRemoved, BlockStored, KvEvent
from halfmoon_scheduling.cache.block_cache import BlockCache, CacheFull, UnknownTicket
from halfmoon_scheduling.tiers.disk_map import DiskMap
from halfmoon_scheduling.tiers.tier_commands import (
    AnnounceBlocks,
    AnswerLease,
    Erase,
    Promote,
    TierCommand,
    WriteBack,
)
from halfmoon_scheduling.tiers.tier_limits import TierLimits
from halfmoon_scheduling.tiers.tiered_cache import TieredCache
from halfmoon_simulator.cluster.cluster_spec import ClusterSpec
from halfmoon_simulator.cluster.event_queue import EventQueue
from halfmoon_simulator.cluster.network_model import NetworkModel

#: Takes the length of a leased prefix.
LeaseAnswer = Callable[[int], None]
_LeaseKey = tuple[str, Ticket]


class SimDisk:
    """Memory over disk of one kvstore."""

    def __init__(
        self,
        memory: BlockCache,
        spec: ClusterSpec,
        block_bytes: int,
        event_queue: EventQueue,
        say: Callable[[KvEvent], None],
    ) -> None:
        """Put an empty disk below an empty memory.

        Args:
            memory: of the kvstore; it belongs to the tiers from now on.
            spec: the disk's size and speed, and the limits of moves.
            block_bytes: bytes of a block.
            event_queue: the clock.
            say: publishes a KV event.
        """
        self._spec = spec
        self._block_bytes = block_bytes
        self._event_queue = event_queue
        self._say = say
        limits = TierLimits(promotion_wait_s=spec.promotion_wait_s, read_ahead=spec.read_ahead)
        disk = DiskMap(int(spec.disk_bytes) // block_bytes, policy=spec.eviction)
        self.tiers = TieredCache(memory, disk, limits)
        # Transfers within one host share one bandwidth, as the operations of one disk do.
        speed = spec.disk_bytes_per_s
        self._bandwidth = NetworkModel(
            event_queue, network_bytes_per_s=speed, local_bytes_per_s=speed
        )
        #: The leases that are not answered yet.
        self._answers: dict[_LeaseKey, LeaseAnswer] = {}
        #: The lease that is being made, and the prefix that it got at once.
        self._made: _LeaseKey | None = None
        self._n_made: int | None = None
        self.dead = False
        #: Blocks of answered leases that memory had, and that came from the disk.
        self.n_from_memory = self.n_from_disk = 0

    def lease(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], answer: LeaseAnswer
    ) -> None:
        """Lease the longest stored prefix; `answer` is called at once if memory has all of it.

        Else it is called when the disk's blocks are in memory, or `promotion_wait_s` are over.
        """
        key = self._made = (owner, ticket)
        self._answers[key] = answer
        self.tiers.lease(owner, ticket, hashes, self._event_queue.now)
        self._perform()
        n_found, self._made, self._n_made = self._n_made, None, None
        if n_found is not None:
            self._give(key, n_found)
        else:
            self._event_queue.after(self._spec.promotion_wait_s, self._on_tick)

    def release(self, owner: str, ticket: Ticket) -> None:
        """End a lease; one that waits ends without an answer."""
        self._answers.pop((owner, ticket), None)
        self.tiers.release(owner, ticket, self._event_queue.now)
        self._perform()

    def reserve(
        self, owner: str, ticket: Ticket, hashes: Sequence[BlockHash], parent: BlockHash | None
    ) -> int | None:
        """Reserve room for new blocks; return how many are to be written, None: no room."""
        try:
            reserved = self.tiers.reserve(owner, ticket, hashes, parent, self._event_queue.now)
        except CacheFull:
            return None
        finally:
            self._perform()
        return len(reserved.places)

    def commit(self, owner: str, ticket: Ticket, n_places: int) -> list[BlockHash]:
        """Serve written blocks; return those that are new. The caller performs `settle` then."""
        try:
            return self.tiers.commit(owner, ticket, [0] * n_places, self._event_queue.now)
        except UnknownTicket:
            return []

    def settle(self) -> None:
        """Perform what followed from a commit, once its blocks are announced."""
        self._perform()

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        """Discard blocks that are not in use."""
        self.tiers.drop(hashes, self._event_queue.now)
        self._perform()

    # -- what the tiers order ----------------------------------------------------------------

    def _perform(self) -> None:
        while commands := self.tiers.commands():
            for command in commands:
                self._perform_one(command)

    def _perform_one(self, command: TierCommand) -> None:
        match command:
            case AnswerLease(owner=owner, ticket=ticket, places=places, n_from_disk=n_from_disk):
                self.n_from_disk += n_from_disk
                self.n_from_memory += len(places) - n_from_disk
                if self._made == (owner, ticket):
                    self._n_made = len(places)
                else:  # in an event of its own: another request's step may have led to it
                    self._event_queue.after(0.0, self._give, (owner, ticket), len(places))
            case AnnounceBlocks(left=left, came=came):
                if left:
                    self._say(BlockRemoved(block_hashes=left))
                for record in came:
                    self._say(
                        BlockStored(
                            block_hashes=(record.hash,),
                            parent_block_hash=record.parent,
                            token_ids=(),
                            block_size=1,
                        )
                    )
            case WriteBack(record=record):
                self._move(partial(self.tiers.on_written, record.hash, "ok"))
            case Promote(record=record):
                self._move(partial(self.tiers.on_promoted, record.hash, "ok"))
            case Erase(disk_slot=slot):
                self.tiers.on_erased(slot)
            case _:
                raise AssertionError(f"an unknown command: {command}")

    def _move(self, moved: Callable[[float], None]) -> None:
        """Read or write one block; `moved` takes the time at which it is done."""

        def done() -> None:
            if not self.dead:
                moved(self._event_queue.now)
                self._perform()

        def begin() -> None:
            if not self.dead:
                self._bandwidth.start("disk", "disk", self._block_bytes, done)

        self._event_queue.after(self._spec.disk_latency_s, begin)

    def _give(self, key: _LeaseKey, n_found: int) -> None:
        """Answer a lease, unless it has been released meanwhile."""
        if (answer := self._answers.pop(key, None)) is not None and not self.dead:
            answer(n_found)

    def _on_tick(self) -> None:
        if not self.dead:
            self.tiers.on_tick(self._event_queue.now)
            self._perform()

    def check(self) -> None:
        """Audit the tiers, and the bandwidth."""
        self.tiers.check()
        self._bandwidth.check()
