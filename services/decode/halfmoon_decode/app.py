"""Build a decode worker: open its parts in order, close them in reverse."""

from contextlib import AsyncExitStack

import msgspec

from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_runtime.clock import SystemClock
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.membership import Membership
from halfmoon_runtime.observability.tracer_setup import opened_tracer
from halfmoon_runtime.worker.open_model import load_model, model_info, place_model
from halfmoon_runtime.worker.open_worker import open_worker
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer.open_transfer_engine import open_transfer_engine
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_spans import DecodeSpans
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.decode.local_prefills import LocalPrefillParts
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache


async def run(settings: DecodeSettings, service: Service) -> None:
    """Run a decode worker until the service is told to stop, then finish its requests."""
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(opened_tracer(settings, "halfmoon-decode"))
        engine = await load_model(settings, service, open_engine, ModelError)
        opened = await stack.enter_async_context(
            open_worker(settings, service, "decode", open_transfer_engine)
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
        kvstores = KvstoreClients(opened.network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        clock = SystemClock()
        replicas = ReplicaSelector(kvstores, engine.layout, clock)
        putter = BlockPutter(replicas, opened.transfer, placed.memory, engine.layout)
        info = msgspec.structs.replace(
            model_info(opened.info, settings, engine, placed.n_pages),
            decode_cost=placed.decode_cost,
            prefill_cost=placed.prefill_cost if settings.local_prefill_tokens else None,
            local_prefill_tokens=settings.local_prefill_tokens,
            keeps_answers=settings.keep_answers,
        )
        worker = DecodeWorker(
            port=opened.port,
            engine=engine,
            region=placed.memory.region,
            info=info,
            settings=settings,
            clock=clock,
            pages=PageAllocator(placed.n_pages),
            spans=DecodeSpans(tracer),
            watch=placed.watch,
            putter=putter if settings.keep_answers else None,
            prefill_parts=LocalPrefillParts(opened.transfer, placed.memory, replicas, tracer),
        )
        metrics = []
        if settings.local_prefill_tokens:  # it reads from kvstores, and writes to them
            endpoints = PeerEndpointCache(opened.store, opened.transfer, info.worker_id)
            await stack.enter_async_context(service.running(endpoints.keep()))
            metrics.append(endpoints.metrics)
        leaving = msgspec.structs.replace(info, draining=True)
        await opened.serve(
            worker,
            Membership(opened.store, info),
            lambda: worker.drain(leaving, settings.drain_s),
            *metrics,
            n_pages=placed.n_pages,
        )
