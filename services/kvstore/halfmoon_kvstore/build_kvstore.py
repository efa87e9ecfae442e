"""Build a kvstore node from the parts of a start."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.drain.drain_migration import DrainMigration
from halfmoon_kvstore.lent_keys import Holder
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_protocol.messages import KvstoreAddress
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_runtime.membership import Membership, find_model_worker
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.worker_env import WorkerEnv
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.regions.region_table import Memory

#: Seconds to wait for another kvstore's answer when its blocks are to be copied.
_COPY_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class BuiltKvstore:
    """A kvstore node that does not serve yet."""

    worker: KvstoreWorker
    membership: Membership
    #: Moves its blocks elsewhere before it leaves.
    migration: DrainMigration


def build_kvstore(
    env: WorkerEnv[TransferEngine],
    memory: Memory,
    disk: SegmentFolder | None,
    settings: KvstoreSettings,
    stack: AsyncExitStack,
    tracer: Tracer | None = None,
) -> BuiltKvstore:
    """Build a kvstore node.

    Args:
        env: what it stands on.
        memory: registered memory for blocks.
        disk: holds blocks that leave memory; None: they are dropped.
        settings: of the node.
        stack: closes what was opened for it, after it has ended.
        tracer: makes spans; None: no traces.

    Raises:
        CannotStart: grants are demanded, and no path checks them.
    """
    info = msgspec.structs.replace(env.info, replicates=True)
    kvstores = KvstoreClients(env.network, _COPY_TIMEOUT_S)
    stack.push_async_callback(kvstores.close)
    membership = env.membership(info)
    try:
        lender = GrantLender[Holder](env.transfer, memory.region, settings.transfer_grants)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    worker = KvstoreWorker(
        env.port,
        memory,
        info,
        settings,
        env.clock,
        membership.update,
        disk,
        ReplicaReader(kvstores, env.transfer, memory),
        tracer,
        lambda: find_model_worker(env.members),
        lender,
    )
    migration = DrainMigration(
        worker.block_store,
        kvstores,
        KvstoreAddress(info.worker_id, info.generation, info.commands, info.key_id),
        env.members,
        settings.drain_mib_per_s * 1024 * 1024,
    )
    return BuiltKvstore(worker, membership, migration)
