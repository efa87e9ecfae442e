"""Build a kvstore node: open its parts in order, close them in reverse."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from halfmoon_kvstore.admin_api import AdminApi
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_kvstore.drain.drain_migration import DrainMigration
from halfmoon_kvstore.lent_keys import Holder
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_protocol.messages import KvstoreAddress, WorkerInfo
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import CannotStart, Service, cannot_start_on
from halfmoon_runtime.membership import find_model_worker, list_members
from halfmoon_runtime.observability.tracer_setup import opened_tracer
from halfmoon_runtime.worker.open_worker import open_worker
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_transfer.open_transfer_engine import open_transfer_engine

_MIB = 1024 * 1024
#: Seconds to wait for another kvstore's answer when its blocks are to be copied.
_COPY_TIMEOUT_S = 5.0


def _check_disk_fits(settings: KvstoreSettings) -> None:
    """Refuse more disk than there can ever be; room that others take now may be free later."""
    there = shutil.disk_usage(settings.disk_path).total
    if settings.disk_bytes > there:
        raise CannotStart(
            f"disk_mib {settings.disk_mib} is more than the {there // _MIB} MiB of the file system "
            f"of disk_path {settings.disk_path!r}; ask for less, or name a folder elsewhere"
        )


async def run(settings: KvstoreSettings, service: Service) -> None:
    """Run a kvstore node until the service is told to stop, then save or move its blocks."""
    async with AsyncExitStack() as stack:
        service.report_stage("joining", worker_id=settings.worker_id)
        tracer = await stack.enter_async_context(opened_tracer(settings, "halfmoon-kvstore"))
        opened = await stack.enter_async_context(
            open_worker(settings, service, "kvstore", open_transfer_engine)
        )
        info = msgspec.structs.replace(opened.info, replicates=True)
        service.report_stage("allocating", worker_id=info.worker_id, mib=settings.capacity_mib)
        asked = f"capacity_mib {settings.capacity_mib} can't be had; ask for less"
        with cannot_start_on(OSError, asked, may_pass=True):
            memory = await asyncio.to_thread(opened.transfer.allocate, settings.capacity_bytes)
        disk = None
        if settings.disk_path:
            where = f"disk_path {settings.disk_path!r} can't be used; name a folder to write in"
            with cannot_start_on(OSError, where):
                disk = SegmentFolder(Path(settings.disk_path), settings.disk_bytes, info.generation)
            stack.callback(disk.close)
            _check_disk_fits(settings)
        kvstores = KvstoreClients(opened.network, _COPY_TIMEOUT_S)
        stack.push_async_callback(kvstores.close)
        membership = opened.membership(info)
        clock = SystemClock()

        async def members() -> list[WorkerInfo]:
            return list((await list_members(opened.store)).values())

        try:
            lender = GrantLender[Holder](opened.transfer, memory.region, settings.transfer_grants)
        except ValueError as error:
            raise CannotStart(str(error)) from error
        worker = KvstoreWorker(
            opened.port,
            memory,
            info,
            settings,
            clock,
            membership.update,
            disk,
            ReplicaReader(kvstores, opened.transfer, memory),
            tracer,
            lambda: find_model_worker(members),
            lender,
        )
        migration = DrainMigration(
            worker.block_store,
            kvstores,
            KvstoreAddress(info.worker_id, info.generation, info.commands, info.key_id),
            members,
            settings.drain_mib_per_s * 1024 * 1024,
        )
        drain = DrainController(worker, migration, settings, service)
        if service.http is not None:
            AdminApi(worker, clock).register(service.http)
            drain.register(service.http)
        await opened.serve(worker, membership, drain.shut_down, drain.metrics)
