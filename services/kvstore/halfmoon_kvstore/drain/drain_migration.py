"""Move blocks that only this node has to other kvstores, before it leaves.

It reads each other kvstore's snapshot of blocks and free bytes. It orders copies of the missing
blocks, by the message that conductors use for hot prefixes, and repeats this until none is left.
`halfmoon_scheduling.directory.drain_plan` chooses the targets. The targets read and verify the
blocks, and announce them.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from halfmoon_kvstore.block_store import BlockStore
from halfmoon_metadata.store_interface import MetadataError
from halfmoon_protocol.ids import Ticket
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import KvstoreAddress, ReplicateBlocks, WorkerInfo
from halfmoon_runtime.kvstore_clients import KvstoreClient, KvstoreClients, KvstoreUnavailable
from halfmoon_scheduling.directory.drain_plan import DrainCopy, DrainingBlock, DrainPlan
from halfmoon_scheduling.tiers.tiered_cache import TieredCache

log = structlog.get_logger()

#: Most blocks of one copy order, and its approximate bytes.
_MAX_BLOCKS = 64
_ORDER_BYTES = 32 * 1024 * 1024
#: Seconds that one copy order may take.
_ORDER_S = 60.0
#: Seconds between two rounds when a target was busy.
_RETRY_S = 0.2


class DrainProgress(msgspec.Struct, frozen=True):
    """Progress of a migration, as operators read it."""

    #: idle; moving; done: other nodes have all blocks; incomplete: `reason` says why not.
    state: str = "idle"
    #: Blocks that only this node had.
    n_blocks: int = 0
    #: Those of them that another node has now.
    n_moved: int = 0
    #: Those that are still here alone.
    n_left: int = 0
    #: Bytes of the moved blocks.
    bytes_moved: int = 0
    #: Why blocks are left; empty: none is, or it goes on.
    reason: str = ""


class DrainMigration:
    """Move one node's blocks to other nodes."""

    def __init__(
        self,
        block_store: BlockStore,
        kvstores: KvstoreClients,
        own: KvstoreAddress,
        members: Callable[[], Awaitable[list[WorkerInfo]]],
        bytes_per_s: float,
    ) -> None:
        """Prepare a migration; `run` starts it.

        Args:
            block_store: holds the blocks to move.
            kvstores: clients of the other nodes.
            own: address at which the other nodes read.
            members: returns all workers in the metadata server.
            bytes_per_s: highest rate of the copies.
        """
        self._block_store = block_store
        self._kvstores = kvstores
        self._own = own
        self._members = members
        self._bytes_per_s = bytes_per_s
        self._n_orders = 0
        #: Time by the event loop's clock at which the next order may begin.
        self._next_s = 0.0
        self.progress = DrainProgress()

    def begin(self) -> None:
        """Set the progress to moving."""
        self.progress = DrainProgress(state="moving")

    async def run(self, limit_s: float) -> None:
        """Move all blocks that no other node has, for at most `limit_s` seconds."""
        self.begin()
        reason = ""
        try:
            async with asyncio.timeout(limit_s):
                reason = await self._move_all()
        except TimeoutError:
            reason = f"its {limit_s:g} s were over"
        state = "incomplete" if reason else "done"
        self._report(state=state, reason=reason)
        (log.warning if reason else log.info)(
            "blocks_moved", n_moved=self.progress.n_moved, n_left=self.progress.n_left,
            reason=reason,
        )  # fmt: skip

    async def _move_all(self) -> str:
        """Copy until no block is left; return the reason if that is impossible."""
        while (
            tiers := self._block_store.tiers
        ) is not None and self._block_store.layout is not None:
            plan, clients, refused = await self._plan(tiers, self._block_store.layout)
            n_moved = self.progress.n_moved
            self._report(
                n_blocks=max(self.progress.n_blocks, n_moved + len(plan.remaining)),
                n_left=len(plan.remaining),
            )
            if not plan.remaining and not tiers.memory.n_reserved:
                return ""  # and no put is pending
            if plan.remaining and not clients:
                return refused or "there is no other kvstore that takes blocks"
            busy = await self._copy(plan, clients, self._block_store.layout)
            if plan.remaining and not busy and self.progress.n_moved == n_moved:
                return f"the other kvstores have no room for {len(plan.remaining)} blocks"
            if busy or tiers.memory.n_reserved:
                await asyncio.sleep(_RETRY_S)
        return ""

    async def _plan(
        self, tiers: TieredCache, layout: KvLayout
    ) -> tuple[DrainPlan, dict[str, KvstoreClient], str]:
        """Return the remaining blocks, the clients of possible targets, and the last refusal."""
        plan = DrainPlan(
            DrainingBlock(block, *tiers.parent_and_depth(block)) for block in tiers.hashes()
        )
        clients: dict[str, KvstoreClient] = {}
        refused = ""
        try:
            members = await self._members()
        except MetadataError as error:
            return plan, clients, f"the metadata server does not list the other kvstores: {error}"
        for info in members:
            fits = info.layout is None or info.layout == layout
            if info.worker_id == self._own.worker_id or info.role != "kvstore" or not fits:
                continue
            if info.draining or not info.replicates:
                continue
            address = KvstoreAddress(info.worker_id, info.generation, info.commands, info.key_id)
            try:
                client = await self._kvstores.client_for(address)
                snapshot = await client.snapshot()
            except KvstoreUnavailable as error:
                refused = str(error)
                continue
            clients[info.worker_id] = client
            n_room = snapshot.room_bytes // layout.block_bytes
            plan.add_target(info.worker_id, snapshot.hashes, n_room)
        return plan, clients, refused

    async def _copy(
        self, plan: DrainPlan, clients: dict[str, KvstoreClient], layout: KvLayout
    ) -> bool:
        """Carry out a plan; return whether a target was busy, so that a retry may help."""
        busy = False
        per_second = int(self._bytes_per_s // layout.block_bytes)
        most = max(1, min(_MAX_BLOCKS, _ORDER_BYTES // layout.block_bytes, per_second))
        while (order := plan.next(most)) is not None:
            await self._pace(len(order.hashes) * layout.block_bytes)
            try:
                done = await clients[order.target].replicate(self._message(order, layout), _ORDER_S)
            except KvstoreUnavailable as error:
                log.info("blocks_not_accepted", by=order.target, reason=str(error))
                busy = busy or error.retry_after_s > 0
                plan.exclude(order.target)
                continue
            plan.on_copied(order, done.n_blocks)
            # Fewer blocks than ordered: some on our disk may not have been promoted in time.
            busy = busy or done.n_blocks < len(order.hashes)
            self._report(
                n_moved=self.progress.n_moved + done.n_blocks,
                n_left=len(plan.remaining),
                bytes_moved=self.progress.bytes_moved + done.n_blocks * layout.block_bytes,
            )
        return busy

    def _message(self, order: DrainCopy, layout: KvLayout) -> ReplicateBlocks:
        self._n_orders += 1
        tiers = self._block_store.tiers
        return ReplicateBlocks(
            ticket=Ticket(f"move-{self._own.worker_id}-{self._own.generation}-{self._n_orders}"),
            source=self._own,
            layout=layout,
            hashes=order.hashes,
            parent=order.parent,
            token_ids=(),
            tenant="" if tiers is None else tiers.tenants.owner(order.hashes[0]),
        )

    async def _pace(self, n_bytes: int) -> None:
        """Wait until so many bytes may be moved at the highest rate."""
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + n_bytes / self._bytes_per_s
        await asyncio.sleep(begin_s - now_s)

    def _report(self, **changes: object) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changes)
