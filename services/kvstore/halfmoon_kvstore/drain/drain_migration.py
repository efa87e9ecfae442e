"""Moves what only this node has to other kvstores, before it leaves.

It asks each of them what it holds and how much room it has, orders copies of the rest by the
message that conductors use for hot prefixes, and looks again until nothing is left. Who gets
what is `halfmoon_scheduling.directory.drain_plan`. The targets read, verify, and announce what they
have.
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

#: Blocks of one order at the most, and about its bytes.
_MAX_BLOCKS = 64
_ORDER_BYTES = 32 * 1024 * 1024
#: Seconds that one order may take.
_ORDER_S = 60.0
#: Seconds between two looks when somebody was busy.
_AGAIN_S = 0.2


class DrainProgress(msgspec.Struct, frozen=True):
    """How far it is."""

    #: idle; moving; done: others have all; incomplete: they have not, `reason` says why.
    state: str = "idle"
    #: Blocks that only this node had, those moved, and those left.
    n_blocks: int = 0
    n_moved: int = 0
    n_left: int = 0
    bytes_moved: int = 0
    reason: str = ""


class DrainMigration:
    """One node's move."""

    def __init__(
        self,
        stock: BlockStore,
        kvstores: KvstoreClients,
        own: KvstoreAddress,
        members: Callable[[], Awaitable[list[WorkerInfo]]],
        bytes_per_s: float,
    ) -> None:
        """Nothing is moved yet.

        Args:
            stock: whose blocks.
            kvstores: reach the others.
            own: where they read.
            members: all workers, as the metadata server knows them.
            bytes_per_s: no more than this is moved.
        """
        self._stock = stock
        self._kvstores = kvstores
        self._own = own
        self._members = members
        self._bytes_per_s = bytes_per_s
        self._n_orders = 0
        #: When the next order may begin, by the event loop's clock.
        self._next_s = 0.0
        self.progress = DrainProgress()

    def begin(self) -> None:
        """Say that it is about to move."""
        self.progress = DrainProgress(state="moving")

    async def run(self, limit_s: float) -> None:
        """Move all that others lack, for so long at the most; `progress` tells how it went."""
        self.begin()
        reason = ""
        try:
            async with asyncio.timeout(limit_s):
                reason = await self._move_all()
        except TimeoutError:
            reason = f"its {limit_s:g} s were over"
        state = "incomplete" if reason else "done"
        self._tell(state=state, reason=reason)
        (log.warning if reason else log.info)(
            "blocks_moved", n_moved=self.progress.n_moved, n_left=self.progress.n_left,
            reason=reason,
        )  # fmt: skip

    async def _move_all(self) -> str:
        """Look and copy until nothing is left; else why there is no use in going on."""
        while (tiers := self._stock.tiers) is not None and self._stock.layout is not None:
            plan, clients, refused = await self._look(tiers, self._stock.layout)
            n_moved = self.progress.n_moved
            self._tell(
                n_blocks=max(self.progress.n_blocks, n_moved + len(plan.remaining)),
                n_left=len(plan.remaining),
            )
            if not plan.remaining and not tiers.memory.n_reserved:
                return ""  # and nothing can come any more
            if plan.remaining and not clients:
                return refused or "there is no other kvstore that takes blocks"
            busy = await self._copy(plan, clients, self._stock.layout)
            if plan.remaining and not busy and self.progress.n_moved == n_moved:
                return f"the other kvstores have no room for {len(plan.remaining)} blocks"
            if busy or tiers.memory.n_reserved:
                await asyncio.sleep(_AGAIN_S)
        return ""

    async def _look(
        self, tiers: TieredCache, layout: KvLayout
    ) -> tuple[DrainPlan, dict[str, KvstoreClient], str]:
        """What is left, who may take it, and why somebody may not."""
        plan = DrainPlan(
            DrainingBlock(block, *tiers.parent_and_depth(block)) for block in tiers.hashes()
        )
        clients: dict[str, KvstoreClient] = {}
        refused = ""
        try:
            members = await self._members()
        except MetadataError as error:
            return plan, clients, f"the metadata server does not say who else is there: {error}"
        for info in members:
            fits = info.layout is None or info.layout == layout
            if info.worker_id == self._own.worker_id or info.role != "kvstore" or not fits:
                continue
            if info.draining or not info.replicates:
                continue
            address = KvstoreAddress(info.worker_id, info.generation, info.commands)
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
        """Carry out a plan; whether somebody was busy, so that another try may help."""
        busy = False
        per_second = int(self._bytes_per_s // layout.block_bytes)
        most = max(1, min(_MAX_BLOCKS, _ORDER_BYTES // layout.block_bytes, per_second))
        while (order := plan.next(most)) is not None:
            await self._pace(len(order.hashes) * layout.block_bytes)
            try:
                done = await clients[order.target].replicate(self._message(order, layout), _ORDER_S)
            except KvstoreUnavailable as error:
                log.info("blocks_not_taken", by=order.target, reason=str(error))
                busy = busy or error.retry_after_s > 0
                plan.exclude(order.target)
                continue
            plan.on_copied(order, done.n_blocks)
            # Less than was asked for: what is on our disk did not come up in time, perhaps.
            busy = busy or done.n_blocks < len(order.hashes)
            self._tell(
                n_moved=self.progress.n_moved + done.n_blocks,
                n_left=len(plan.remaining),
                bytes_moved=self.progress.bytes_moved + done.n_blocks * layout.block_bytes,
            )
        return busy

    def _message(self, order: DrainCopy, layout: KvLayout) -> ReplicateBlocks:
        self._n_orders += 1
        tiers = self._stock.tiers
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
        """Wait until so many bytes may be moved."""
        now_s = asyncio.get_running_loop().time()
        begin_s = max(now_s, self._next_s)
        self._next_s = begin_s + n_bytes / self._bytes_per_s
        await asyncio.sleep(begin_s - now_s)

    def _tell(self, **changes: object) -> None:
        self.progress = msgspec.structs.replace(self.progress, **changes)
