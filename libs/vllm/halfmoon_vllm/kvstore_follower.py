"""Follow the kvstores of a cluster: which there are, and which blocks each holds.

Like the Conductor it reads the records of members, dials each kvstore, and follows its numbered KV
events from a snapshot on. When a kvstore is lost, its blocks leave the index at once. While the
metadata server is away, what is known stays.
"""

import asyncio
import threading
from collections.abc import Sequence

import structlog

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_protocol.ids import BlockHash, WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.kv_layout import KvLayout
from halfmoon_protocol.messages import (
    BlocksSnapshot,
    KvstoreAddress,
    KvstoreLoad,
    SnapshotBlocks,
    WorkerInfo,
)
from halfmoon_protocol.snapshots import PAGE
from halfmoon_runtime.channels.network import Network, PeerUnreachable, WorkerLink
from halfmoon_runtime.membership import MemberChanged, MemberGone, MemberJoined, watch_members
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.placement.stable_draw import stable_draw

log = structlog.get_logger()

_REDIAL_S = 0.2
_POLL_S = 0.5
#: Seconds after which a snapshot is requested again.
_SNAPSHOT_S = 5.0


class KvstoreFollower:
    """Keep an index of the blocks of all kvstores with one layout.

    `run` works in an event loop; the lookups are safe from any thread.
    """

    def __init__(self, network: Network, store: MetadataStore, layout: KvLayout) -> None:
        self._network = network
        self._store = store
        self._layout = layout
        #: Held while the index or the set of live kvstores is changed or read.
        self._lock = threading.Lock()
        self._index = PrefixIndex()
        #: Kvstores that answer now.
        self._live: dict[WorkerId, KvstoreAddress] = {}
        self._tasks: dict[WorkerId, tuple[int, asyncio.Task[None]]] = {}
        #: Starts of kvstores that have a record now.
        self._recorded: set[tuple[WorkerId, int]] = set()
        #: Kvstores with another layout that were logged.
        self._refused: set[WorkerId] = set()

    # -- from any thread -----------------------------------------------------------------------

    def holders(self, hashes: Sequence[BlockHash]) -> list[tuple[KvstoreAddress, int]]:
        """Return the kvstores that hold the first of these blocks, longest prefix first."""
        with self._lock:
            lengths = self._index.longest_prefix(hashes)
            found = [(self._live[w], n) for w, n in lengths.items() if w in self._live]
        return sorted(found, key=lambda held: (-held[1], held[0].worker_id))

    def home_for(self, first: BlockHash, preferred: str) -> KvstoreAddress | None:
        """Choose the kvstore that keeps new blocks of prompts that begin with this block.

        All servers choose the same one of the same kvstores, so that one has the whole prefix.
        """
        with self._lock:
            live = dict(self._live)
        if (wanted := live.get(WorkerId(preferred))) is not None:
            return wanted
        best = max(live, key=lambda worker: stable_draw(first.hex(), worker), default=None)
        return None if best is None else live[best]

    @property
    def n_live(self) -> int:
        """Kvstores that answer now."""
        with self._lock:
            return len(self._live)

    # -- in the event loop ---------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for change in watch_members(self._store, interval_s=_POLL_S):
                match change:
                    case MemberJoined(info=info) | MemberChanged(info=info):
                        self._on_member(info, tasks)
                    case MemberGone(worker_id=worker_id, generation=generation):
                        self._recorded.discard((worker_id, generation))

    def _on_member(self, info: WorkerInfo, tasks: asyncio.TaskGroup) -> None:
        if info.role != "kvstore":
            return
        worker_id = info.worker_id
        if info.layout not in (None, self._layout):
            self._stop(worker_id)
            if worker_id not in self._refused:
                self._refused.add(worker_id)
                log.error("kvstore_not_used", kvstore=worker_id, reason=self._difference(info))
            return
        self._recorded.add((worker_id, info.generation))
        known = self._tasks.get(worker_id)
        if known is None or known[0] != info.generation or known[1].done():
            self._stop(worker_id)
            following = tasks.create_task(self._follow(info), name=f"follow {worker_id}")
            self._tasks[worker_id] = info.generation, following

    def _difference(self, info: WorkerInfo) -> str:
        assert info.layout is not None
        fields = KvLayout.__struct_fields__
        pairs = [(name, getattr(self._layout, name), getattr(info.layout, name)) for name in fields]
        return "its blocks are of another layout: " + "; ".join(
            f"{name} is {ours!r} here, {theirs!r} there"
            for name, ours, theirs in pairs
            if ours != theirs
        )

    def _stop(self, worker_id: WorkerId) -> None:
        known = self._tasks.pop(worker_id, None)
        if known is not None:
            known[1].cancel()

    async def _follow(self, info: WorkerInfo) -> None:
        """Keep a link to one start of a kvstore while its record lives.

        A link that is up outlives the record: a metadata server that lost its data has no records
        until their owners have written them again.
        """
        events = KvEventFollower(self._index)
        while (info.worker_id, info.generation) in self._recorded:
            try:
                await self._follow_link(info, events)
            except PeerUnreachable as error:
                log.warning("kvstore_lost", kvstore=info.worker_id, reason=str(error))
            except Exception:  # a bug of ours costs only this link, not those to other kvstores
                log.exception("kvstore_failed", kvstore=info.worker_id)
            await asyncio.sleep(_REDIAL_S)

    async def _follow_link(self, info: WorkerInfo, events: KvEventFollower) -> None:
        """Make a link to a kvstore, and read it to its end."""
        link = await self._network.dial(info.commands, info.events, key_id=info.key_id)
        try:
            await self._listen(info, link, events)
        finally:
            with self._lock:
                events.on_lost(info.worker_id)
                self._live.pop(info.worker_id, None)
            await link.close()

    async def _listen(self, info: WorkerInfo, link: WorkerLink, events: KvEventFollower) -> None:
        loop, worker_id = asyncio.get_running_loop(), info.worker_id
        await link.send(SnapshotBlocks(page=PAGE))
        with self._lock:
            events.on_joined(worker_id, loop.time())
        while True:
            message = await link.receive()
            now = loop.time()
            with self._lock:
                if worker_id not in self._live:
                    # It has answered.
                    self._live[worker_id] = KvstoreAddress(
                        worker_id, info.generation, info.commands, info.key_id
                    )
                ask = worker_id in events.overdue(now, _SNAPSHOT_S)
                match message:
                    case KvEventBatch():
                        ask |= events.on_events(worker_id, message, now)
                    case BlocksSnapshot():
                        ask |= events.on_snapshot(worker_id, message, now)
                    case KvstoreLoad(sequence=sequence):
                        ask |= events.on_sequence(worker_id, sequence, now)
                    case _:
                        pass
            if ask:
                await link.send(SnapshotBlocks(page=PAGE))
