"""Follow which blocks each kvstore holds, and have hot prefixes copied.

The index is soft state: KV events keep it up to date, and a snapshot replaces what is known of a
kvstore whenever events were missed.
"""

from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.kv_events import KvEventBatch
from halfmoon_protocol.messages import (
    BlocksReplicated,
    BlocksSnapshot,
    DropBlocks,
    KvstoreLoad,
    KvstoreRefused,
    ReplicateBlocks,
    SnapshotBlocks,
)
from halfmoon_protocol.snapshots import PAGE
from halfmoon_scheduling.cluster.cluster_state import Cluster
from halfmoon_scheduling.cluster.send_if_live import send_if_live
from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.directory.kv_event_follower import KvEventFollower
from halfmoon_scheduling.directory.prefix_index import PrefixIndex
from halfmoon_scheduling.directory.replication import CopyPrefix, DropCopies, Replicator
from halfmoon_scheduling.events import Request
from halfmoon_scheduling.placement.estimates import Placement

#: Seconds between two plans of copies.
REPLICATION_PERIOD_S = 1.0
#: Blocks that one tick visits to remove workers that are gone: some three milliseconds.
_SWEPT_BLOCKS = 10_000
#: Seconds in which a kvstore that refused a copy is asked for no other, at least.
REFUSED_COPY_S = 10.0


class KvstoreDirectory:
    """Hold the prefix index, and the copies that were ordered."""

    def __init__(self, config: SchedulingConfig, cluster: Cluster, index: PrefixIndex) -> None:
        """Start with kvstores of unknown contents."""
        self._cluster = cluster
        self._index = index
        self._snapshot_timeout_s = config.snapshot_timeout_s
        self.follower = KvEventFollower(index)
        #: None: no copies are made.
        self._replicator: Replicator | None = None
        if config.replication_bytes_per_s:
            self._replicator = Replicator(
                config.replication_bytes_per_s,
                config.replication_hot_uses,
                config.replication_half_life_s,
            )
        #: When copies were planned last.
        self._planned_s = float("-inf")

    # -- kvstores and their events -----------------------------------------------------------

    def on_joined(self, kvstore: WorkerId, now: float) -> list[AnyCommand]:
        """Ask a kvstore that has joined for all that it stores."""
        return self._snapshot_if(self.follower.on_joined(kvstore, now), kvstore)

    def on_lost(self, worker_id: WorkerId) -> None:
        """Forget a worker that has left; one that is no kvstore is fine."""
        self.follower.on_lost(worker_id)
        if self._replicator is not None:
            self._replicator.on_lost(worker_id)

    def on_kv_events(self, kvstore: WorkerId, batch: KvEventBatch, now: float) -> list[AnyCommand]:
        """Apply KV events to the index."""
        return self._snapshot_if(self.follower.on_events(kvstore, batch, now), kvstore)

    def on_load(self, kvstore: WorkerId, load: KvstoreLoad, now: float) -> list[AnyCommand]:
        """Compare the newest KV event that a kvstore has published with the newest received."""
        return self._snapshot_if(self.follower.on_sequence(kvstore, load.sequence, now), kvstore)

    def on_snapshot(
        self, kvstore: WorkerId, snapshot: BlocksSnapshot, now: float
    ) -> list[AnyCommand]:
        """Replace what the index has of a kvstore, a page at a time."""
        return self._snapshot_if(self.follower.on_snapshot(kvstore, snapshot, now), kvstore)

    def distrust(self, kvstore: WorkerId, now: float) -> list[AnyCommand]:
        """Drop the index entries of a kvstore that failed a reader, and ask for a snapshot."""
        return self._snapshot_if(self.follower.distrust(kvstore, now), kvstore)

    def _snapshot_if(self, must_ask: bool, kvstore: WorkerId) -> list[AnyCommand]:
        return send_if_live(self._cluster, kvstore, SnapshotBlocks(page=PAGE)) if must_ask else []

    # -- copies of hot prefixes --------------------------------------------------------------

    def on_prefix_used(
        self, request: Request, placement: Placement, block_size: int, now: float
    ) -> None:
        """Count a use of the longest prefix of a request that any candidate has cached."""
        if self._replicator is not None:
            known = request.block_hashes[: placement.known_blocks]
            self._replicator.on_used(known, request.token_ids, block_size, now)

    def on_copy_answered(
        self, kvstore: WorkerId, answer: BlocksReplicated | KvstoreRefused, now: float
    ) -> None:
        """Note whether a kvstore has made a copy that was ordered."""
        if self._replicator is None:
            return
        if isinstance(answer, BlocksReplicated):
            self._replicator.on_copied(kvstore, answer.ticket, answer.n_blocks)
        else:
            until_s = now + max(answer.retry_after_s, REFUSED_COPY_S)
            self._replicator.on_refused(kvstore, answer.ticket, until_s)

    def copies_under_way(self) -> list[CopyPrefix]:
        """Return the copies of hot prefixes that kvstores make now."""
        return [] if self._replicator is None else self._replicator.under_way()

    # -- time --------------------------------------------------------------------------------

    def on_tick(self, now: float) -> list[AnyCommand]:
        """Ask again for overdue snapshots; order copies of hot prefixes, and drop cold ones.

        Blocks of kvstores that are gone leave the index meanwhile, a piece at a time.
        """
        self._index.sweep(_SWEPT_BLOCKS)
        commands: list[AnyCommand] = []
        for kvstore in self.follower.overdue(now, self._snapshot_timeout_s):
            commands += send_if_live(self._cluster, kvstore, SnapshotBlocks(page=PAGE))
        return commands + self._plan_copies(now)

    def _plan_copies(self, now: float) -> list[AnyCommand]:
        layout = self._cluster.layout
        is_due = self._planned_s + REPLICATION_PERIOD_S <= now
        if self._replicator is None or layout is None or not is_due:
            return []
        self._planned_s = now
        room = {
            info.worker_id: max(0, info.n_blocks - self._index.n_blocks(info.worker_id))
            for info in self._cluster.accepting("kvstore")
            if info.replicates
        }
        commands: list[AnyCommand] = []
        for change in self._replicator.plan(
            self._index,
            room,
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            now=now,
            unreadable=self._cluster.servers,
        ):
            match change:
                case CopyPrefix():
                    copy = ReplicateBlocks(
                        ticket=change.ticket,
                        source=self._cluster.address(change.source),
                        layout=layout,
                        hashes=change.hashes,
                        parent=change.parent,
                        token_ids=change.token_ids,
                    )
                    commands += send_if_live(self._cluster, change.target, copy)
                case DropCopies():
                    drop = DropBlocks(hashes=change.hashes)
                    commands += send_if_live(self._cluster, change.kvstore, drop)
        return commands

    def check(self) -> None:
        """Audit the index and what was ordered."""
        self._index.check()
        self.follower.check()
        if self._replicator is not None:
            self._replicator.check()
