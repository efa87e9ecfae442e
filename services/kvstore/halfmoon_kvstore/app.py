"""Run a kvstore node: open its parts in order, close them in reverse."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

from halfmoon_kvstore.admin_api import AdminApi
from halfmoon_kvstore.build_kvstore import build_kvstore
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.lifecycle import CannotStart, Service, cannot_start_on
from halfmoon_runtime.observability.tracer_setup import opened_tracer
from halfmoon_runtime.worker.open_worker import open_worker
from halfmoon_transfer.open_transfer_engine import open_transfer_engine

_MIB = 1024 * 1024


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
        env = opened.env
        service.report_stage("allocating", worker_id=settings.worker_id, mib=settings.capacity_mib)
        asked = f"capacity_mib {settings.capacity_mib} can't be had; ask for less"
        with cannot_start_on(OSError, asked, may_pass=True):
            memory = await asyncio.to_thread(env.transfer.allocate, settings.capacity_bytes)
        disk = None
        if settings.disk_path:
            where = f"disk_path {settings.disk_path!r} can't be used; name a folder to write in"
            with cannot_start_on(OSError, where):
                disk = SegmentFolder(
                    Path(settings.disk_path), settings.disk_bytes, env.info.generation
                )
            stack.callback(disk.close)
            _check_disk_fits(settings)
        built = build_kvstore(env, memory, disk, settings, stack, tracer)
        drain = DrainController(built.worker, built.migration, settings, service)
        if service.http is not None:
            AdminApi(built.worker, env.clock).register(service.http)
            drain.register(service.http)
        await opened.serve(built.worker, built.membership, drain.shut_down, drain.metrics)
