"""Build a prefill worker from the parts of a start."""

from contextlib import AsyncExitStack

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_workers.prefill.forward_pass import PrefillForward
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.prefill_worker import PrefillWorker
from halfmoon_workers.prefill.stage_engine import host_view, say_layers
from halfmoon_workers.prefill.stage_links import StageLinks
from halfmoon_workers.start.worker_start import BuiltWorker, WorkerStart


def build_prefill(
    start: WorkerStart, settings: PrefillSettings, stack: AsyncExitStack
) -> BuiltWorker[PrefillWorker]:
    """Build a prefill worker, which does not serve yet.

    Args:
        start: its parts.
        settings: of the worker.
        stack: closes what was opened for it, after it has ended.
    """
    env, placed, stage = start.env, start.placed, settings.stage_record
    stages = None
    if start.stage_engine is not None:
        if start.stage_engine is not start.engine:
            start.stage_engine.attach(host_view(start.memory))
            stack.callback(start.stage_engine.detach)
        stages = StageLinks(env.network)
        stack.push_async_callback(stages.close)
    kvstores = KvstoreClients(env.network, settings.kvstore_timeout_s)
    stack.push_async_callback(kvstores.close)
    info = msgspec.structs.replace(
        start.info(settings),
        prefill_cost=placed.prefill_cost,
        home_kvstore=WorkerId(settings.home_kvstore) if settings.home_kvstore else None,
        stage=None if stage is None else say_layers(stage, start.engine.layout.n_layers),
        stage_layers_only=settings.stage_layers_only,
        skips_held_blocks=True,
    )
    worker = PrefillWorker(
        port=env.port,
        forward=PrefillForward(
            start.engine,
            env.transfer.submit,
            start.memory.region,
            env.clock,
            start.stage_engine,
            start.threads.wait_for,
        ),
        transfer=env.transfer,
        memory=start.memory,
        kvstores=kvstores,
        info=info,
        settings=settings,
        clock=env.clock,
        pages=PageAllocator(placed.n_pages),
        stages=stages,
        role_switch=start.switch,
        tracer=start.tracer,
        watch=placed.watch,
        open_forward=start.threads.open_forward,
        checksum_thread=start.threads.checksums,
    )
    endpoints = PeerEndpointCache(env.store, env.transfer, info.worker_id, now=env.clock.now)
    return BuiltWorker(worker, info, (endpoints.keep,), (endpoints.metrics,))
