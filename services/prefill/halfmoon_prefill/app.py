"""Builds a prefill worker: model, pool, port, membership; opened in order, closed in reverse."""

import asyncio
from contextlib import AsyncExitStack

import msgspec

from halfmoon_engine.load import open_engine
from halfmoon_metadata import open_store
from halfmoon_models.errors import ModelError
from halfmoon_prefill.forward_pass import PrefillForward
from halfmoon_prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_prefill.settings import PrefillSettings
from halfmoon_prefill.worker import PrefillWorker
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import PrefillCost, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import CannotStart, Service
from halfmoon_runtime.membership import Membership, next_generation
from halfmoon_runtime.observability.tracing import open_tracer
from halfmoon_runtime.observability.transfer_metrics import transfer_engine_metrics
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.registration import registered_worker
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer import ClusterKey, TransferEngine, TransferSettings


async def run(settings: PrefillSettings, service: Service) -> None:
    """Be a prefill worker until told to stop, then finish what is here."""
    async with AsyncExitStack() as stack:
        worker_id = WorkerId(settings.worker_id)
        clock = SystemClock()
        service.announce("loading", worker_id=worker_id, model=settings.model)
        if tracer := open_tracer(settings, "halfmoon-prefill"):
            stack.push_async_callback(tracer.close)
        try:
            engine = await asyncio.to_thread(
                open_engine,
                settings.model,
                block_size=settings.block_size,
                dtype=settings.dtype,
                device=settings.device,
                threads=settings.threads or None,
            )
        except ModelError as error:
            raise CannotStart(str(error)) from error
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
        n_pages = settings.pages_of(engine.layout.block_bytes)
        memory = await asyncio.to_thread(transfer.allocate, n_pages * engine.layout.block_bytes)
        engine.attach(memory.view)
        cost = PrefillCost()
        if settings.measure:
            service.announce("measuring", worker_id=worker_id)
            cost, _ = await asyncio.to_thread(engine.measure)
        watch = ForwardWatchdog(settings.forward_limit_s)
        stack.enter_context(watch.run_in_background())
        network = ZmqNetwork(advertise_host=settings.advertised_host)
        stack.push_async_callback(network.close)
        kvstores = KvstoreClients(network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        port = await network.bind(worker_id, host=settings.host)
        info = WorkerInfo(
            worker_id=worker_id,
            role="prefill",
            generation=generation,
            host=settings.host_id,
            commands=port.commands,
            events=port.events,
            layout=engine.layout,
            model=settings.served_model_name or engine.name,
            max_context=engine.max_context,
            n_blocks=n_pages,
            prefill_cost=cost,
            home_kvstore=WorkerId(settings.home_kvstore) if settings.home_kvstore else None,
        )
        worker = PrefillWorker(
            port=port,
            forward=PrefillForward(engine, transfer.submit, memory.region, clock),
            transfer=transfer,
            memory=memory,
            kvstores=kvstores,
            info=info,
            settings=settings,
            clock=clock,
            pages=PageAllocator(n_pages),
            tracer=tracer,
            watch=watch,
        )
        moved = transfer_engine_metrics(transfer.stats)
        acquaintances = PeerEndpointCache(store, transfer, worker_id)
        async with (
            registered_worker(
                worker, Membership(store, info), service, moved, acquaintances.metrics
            ),
            service.running(acquaintances.keep()),
        ):
            service.announce("ready", worker_id=worker_id, n_pages=n_pages)
            await service.stopping.wait()
            service.announce("draining", worker_id=worker_id)
            await worker.drain(msgspec.structs.replace(info, draining=True), settings.drain_s)
