"""Builds a kvstore node: memory, disk, port, membership, worker; opened in order."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from halfmoon_kvstore.admin_api import AdminApi
from halfmoon_kvstore.disk_tier.segment_folder import SegmentFolder
from halfmoon_kvstore.drain.drain_controller import DrainController
from halfmoon_kvstore.drain.drain_migration import DrainMigration
from halfmoon_kvstore.replication.replica_reader import ReplicaReader
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_kvstore.worker import KvstoreWorker
from halfmoon_metadata import open_store
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import KvstoreAddress, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import Membership, find_model_worker, list_members, next_generation
from halfmoon_runtime.observability.tracing import open_tracer
from halfmoon_runtime.observability.transfer_metrics import transfer_engine_metrics
from halfmoon_runtime.worker.registration import registered_worker
from halfmoon_transfer import ClusterKey, TransferEngine, TransferSettings

#: Seconds to wait for another kvstore's answer when its blocks are to be copied.
_COPY_TIMEOUT_S = 5.0


async def run(settings: KvstoreSettings, service: Service) -> None:
    """Be a kvstore node until told to stop."""
    async with AsyncExitStack() as stack:
        worker_id = WorkerId(settings.worker_id)
        service.announce("joining", worker_id=worker_id)
        if tracer := open_tracer(settings, "halfmoon-kvstore"):
            stack.push_async_callback(tracer.close)
        store = open_store(settings.metadata)
        stack.callback(store.close)
        generation = await next_generation(store, worker_id)
        transfer = stack.enter_context(
            TransferEngine.open(
                worker_id,
                metadata=store,
                generation=generation,
                backends=settings.transfer_paths,
                bind=settings.transfer_bind,
                advertise=settings.transfer_advertise,
                host_id=settings.host_id,
                settings=TransferSettings(
                    cluster_key=ClusterKey.given(settings.cluster_key.get_secret_value())
                ),
            )
        )
        service.announce("allocating", worker_id=worker_id, mib=settings.capacity_mib)
        memory = await asyncio.to_thread(transfer.allocate, settings.capacity_bytes)
        disk = None
        if settings.disk_path:
            disk = SegmentFolder(Path(settings.disk_path), settings.disk_bytes, generation)
            stack.callback(disk.close)
        network = ZmqNetwork(advertise_host=settings.advertised_host)
        stack.push_async_callback(network.close)
        port = await network.bind(worker_id, host=settings.host)
        info = WorkerInfo(
            worker_id=worker_id,
            role="kvstore",
            generation=generation,
            host=settings.host_id,
            commands=port.commands,
            events=port.events,
            replicates=True,
            http="" if service.http is None else service.http.url(settings.advertised_host),
        )
        membership = Membership(store, info)
        kvstores = KvstoreClients(network, _COPY_TIMEOUT_S)
        stack.push_async_callback(kvstores.close)
        copier = ReplicaReader(kvstores, transfer, memory)
        clock = SystemClock()

        async def others() -> list[WorkerInfo]:
            return list((await list_members(store)).values())

        worker = KvstoreWorker(
            port,
            memory,
            info,
            settings,
            clock,
            membership.update,
            disk,
            copier,
            tracer,
            lambda: find_model_worker(others),
        )

        own = KvstoreAddress(worker_id, generation, port.commands)
        drain_bytes_per_s = settings.drain_mib_per_s * 1024 * 1024
        moving = DrainMigration(worker.stock, kvstores, own, others, drain_bytes_per_s)
        draining = DrainController(worker, moving, settings, service)
        if service.http is not None:
            AdminApi(worker, clock).register(service.http)
            draining.register(service.http)
        read = (draining.metrics, transfer_engine_metrics(transfer.stats))
        async with registered_worker(worker, membership, service, *read):
            service.announce("ready", worker_id=worker_id)
            await service.stopping.wait()
            service.announce("draining", worker_id=worker_id)
            await draining.stop()
