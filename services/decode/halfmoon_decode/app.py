"""Build a decode worker: model, pool, port and membership, closed in reverse order."""

import asyncio
from contextlib import AsyncExitStack

import msgspec

from halfmoon_decode.settings import DecodeSettings
from halfmoon_decode.trace_spans import DecodeSpans
from halfmoon_decode.worker import DecodeWorker
from halfmoon_engine.load import open_engine
from halfmoon_metadata import open_store
from halfmoon_models.errors import ModelError
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import DecodeCost, WorkerInfo
from halfmoon_runtime.channels.zmq_network import ZmqNetwork
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.lifecycle import CannotStart, Service
from halfmoon_runtime.membership import Membership, next_generation
from halfmoon_runtime.observability.tracing import open_tracer
from halfmoon_runtime.observability.transfer_metrics import transfer_engine_metrics
from halfmoon_runtime.worker.forward_watchdog import ForwardWatchdog
from halfmoon_runtime.worker.registration import registered_worker
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer import ClusterKey, TransferEngine, TransferSettings


async def run(settings: DecodeSettings, service: Service) -> None:
    """Run a decode worker until it is stopped, then finish its requests."""
    async with AsyncExitStack() as stack:
        worker_id = WorkerId(settings.worker_id)
        service.announce("loading", worker_id=worker_id, model=settings.model)
        if tracer := open_tracer(settings, "halfmoon-decode"):
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
        cost = DecodeCost()
        if settings.measure:
            service.announce("measuring", worker_id=worker_id)
            _, cost = await asyncio.to_thread(engine.measure)
        watch = ForwardWatchdog(settings.forward_limit_s)
        stack.enter_context(watch.run_in_background())
        network = ZmqNetwork(advertise_host=settings.advertised_host)
        stack.push_async_callback(network.close)
        port = await network.bind(worker_id, host=settings.host)
        info = WorkerInfo(
            worker_id=worker_id,
            role="decode",
            generation=generation,
            host=settings.host_id,
            commands=port.commands,
            events=port.events,
            layout=engine.layout,
            model=settings.served_model_name or engine.name,
            max_context=engine.max_context,
            n_blocks=n_pages,
            decode_cost=cost,
        )
        worker = DecodeWorker(
            port=port,
            engine=engine,
            region=memory.region,
            info=info,
            settings=settings,
            clock=SystemClock(),
            pages=PageAllocator(n_pages),
            spans=DecodeSpans(tracer),
            watch=watch,
        )
        moved = transfer_engine_metrics(transfer.stats)
        async with registered_worker(worker, Membership(store, info), service, moved):
            service.announce("ready", worker_id=worker_id, n_pages=n_pages)
            await service.stopping.wait()
            service.announce("draining", worker_id=worker_id)
            await worker.drain(msgspec.structs.replace(info, draining=True), settings.drain_s)
