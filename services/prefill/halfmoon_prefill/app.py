"""Build a prefill worker: open its parts in order, close them in reverse."""

from contextlib import AsyncExitStack

import msgspec

from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.observability.tracer_setup import opened_tracer
from halfmoon_runtime.worker.open_model import load_model, model_info, place_model
from halfmoon_runtime.worker.open_worker import open_worker
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer.open_transfer_engine import open_transfer_engine
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import host_view, load_stage
from halfmoon_workers.prefill.stage_links import StageLinks


async def run(settings: PrefillSettings, service: Service) -> None:
    """Run a prefill worker until the service is told to stop, then finish its requests."""
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(opened_tracer(settings, "halfmoon-prefill"))
        engine = await load_model(settings, service, open_engine, ModelError)
        stage = settings.stage_record
        stage_engine = None if stage is None else await load_stage(settings, service, engine, stage)
        opened = await stack.enter_async_context(
            open_worker(settings, service, "prefill", open_transfer_engine)
        )
        placed = await stack.enter_async_context(
            place_model(
                settings,
                service,
                engine,
                opened.transfer.allocate,
                opened.transfer.register_device,
            )
        )
        stages = None
        if stage_engine is not None:
            stage_engine.attach(host_view(placed.memory))
            stack.callback(stage_engine.detach)
            stages = StageLinks(opened.network)
            stack.push_async_callback(stages.close)
        kvstores = KvstoreClients(opened.network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        info = msgspec.structs.replace(
            model_info(opened.info, settings, engine, placed.n_pages),
            prefill_cost=placed.prefill_cost,
            home_kvstore=WorkerId(settings.home_kvstore) if settings.home_kvstore else None,
            stage=stage,
        )
        clock = SystemClock()
        worker = PrefillWorker(
            port=opened.port,
            forward=PrefillForward(
                engine, opened.transfer.submit, placed.memory.region, clock, stage_engine
            ),
            transfer=opened.transfer,
            memory=placed.memory,
            kvstores=kvstores,
            info=info,
            settings=settings,
            clock=clock,
            pages=PageAllocator(placed.n_pages),
            stages=stages,
            tracer=tracer,
            watch=placed.watch,
        )
        endpoints = PeerEndpointCache(opened.store, opened.transfer, info.worker_id)
        await stack.enter_async_context(service.running(endpoints.keep()))
        leaving = msgspec.structs.replace(info, draining=True)
        await opened.serve(
            worker,
            Membership(opened.store, info),
            lambda: worker.drain(leaving, settings.drain_s),
            endpoints.metrics,
            n_pages=placed.n_pages,
        )
