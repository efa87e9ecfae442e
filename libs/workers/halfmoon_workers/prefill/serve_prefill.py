"""Build a prefill worker from the parts of a start, and serve until it is to leave."""

from contextlib import AsyncExitStack

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import host_view, say_layers
from halfmoon_workers.prefill.stage_links import StageLinks
from halfmoon_workers.start.worker_start import WorkerStart


async def serve_prefill(start: WorkerStart, settings: PrefillSettings) -> None:
    """Run a prefill worker until it is to leave, then finish its requests."""
    opened, placed, stage = start.opened, start.placed, settings.stage_record
    async with AsyncExitStack() as stack:
        stages = None
        if start.stage_engine is not None:
            if start.stage_engine is not start.engine:
                start.stage_engine.attach(host_view(start.memory))
                stack.callback(start.stage_engine.detach)
            stages = StageLinks(opened.network)
            stack.push_async_callback(stages.close)
        kvstores = KvstoreClients(opened.network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        info = msgspec.structs.replace(
            start.info(settings),
            prefill_cost=placed.prefill_cost,
            home_kvstore=WorkerId(settings.home_kvstore) if settings.home_kvstore else None,
            stage=None if stage is None else say_layers(stage, start.engine.layout.n_layers),
            stage_layers_only=settings.stage_layers_only,
            skips_held_blocks=True,
        )
        clock = SystemClock()
        worker = PrefillWorker(
            port=opened.port,
            forward=PrefillForward(
                start.engine,
                opened.transfer.submit,
                start.memory.region,
                clock,
                start.stage_engine,
            ),
            transfer=opened.transfer,
            memory=start.memory,
            kvstores=kvstores,
            info=info,
            settings=settings,
            clock=clock,
            pages=PageAllocator(placed.n_pages),
            stages=stages,
            role_switch=start.switch,
            tracer=start.tracer,
            watch=placed.watch,
        )
        endpoints = PeerEndpointCache(opened.store, opened.transfer, info.worker_id)
        await stack.enter_async_context(opened.service.running(endpoints.keep()))
        await start.serve(
            worker,
            info,
            lambda leaving: worker.drain(leaving, settings.drain_s),
            endpoints.metrics,
        )
