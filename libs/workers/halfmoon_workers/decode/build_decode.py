"""Build a decode worker from the parts of a start."""

from contextlib import AsyncExitStack

import msgspec
import structlog

from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.kvstore_clients import KvstoreClients
from halfmoon_runtime.lifecycle import CannotStart
from halfmoon_scheduling.decode.page_allocator import PageAllocator
from halfmoon_transfer.grant_lender import GrantLender
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.decode.decode_spans import DecodeSpans
from halfmoon_workers.decode.decode_worker import DecodeWorker
from halfmoon_workers.decode.local_prefills import LocalPrefillParts
from halfmoon_workers.decode.nearby_writers import watch_nearby_writers
from halfmoon_workers.prefill.peer_endpoint_cache import PeerEndpointCache
from halfmoon_workers.start.worker_start import BuiltWorker, WorkerStart

log = structlog.get_logger()


def build_decode(
    start: WorkerStart, settings: DecodeSettings, stack: AsyncExitStack
) -> BuiltWorker[DecodeWorker]:
    """Build a decode worker, which does not serve yet.

    Args:
        start: its parts.
        settings: of the worker.
        stack: closes what was opened for it, after it has ended.

    Raises:
        CannotStart: grants are demanded, and no path checks them.
    """
    env, placed = start.env, start.placed
    kvstores = KvstoreClients(env.network, settings.kvstore_timeout_s)
    stack.push_async_callback(kvstores.close)
    replicas = ReplicaSelector(kvstores, start.engine.layout, env.clock)
    putter = BlockPutter(replicas, env.transfer, start.memory, start.engine.layout)
    info = msgspec.structs.replace(
        start.info(settings),
        decode_cost=placed.decode_cost,
        prefill_cost=placed.prefill_cost if settings.local_prefill_tokens else None,
        local_prefill_tokens=settings.local_prefill_tokens,
        local_prefill_step_s=settings.local_prefill_step_s,
        local_prefill_tbt_s=settings.local_prefill_tbt_s,
        keeps_answers=settings.keep_answers,
        keeps_pages=settings.keep_pages,
        skips_held_blocks=True,
    )
    try:
        lender = GrantLender[RequestId](env.transfer, start.memory.region, settings.transfer_grants)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    worker = DecodeWorker(
        port=env.port,
        engine=start.engine,
        region=start.memory.region,
        info=info,
        settings=settings,
        clock=env.clock,
        pages=PageAllocator(placed.n_pages),
        role_switch=start.switch,
        spans=DecodeSpans(start.tracer),
        lender=lender,
        watch=placed.watch,
        open_forward=start.threads.open_forward,
        putter=putter if settings.keep_answers else None,
        prefill_parts=LocalPrefillParts(
            env.transfer, start.memory, replicas, start.tracer, start.threads
        ),
    )

    def on_writers(nearby: bool) -> None:
        if lender.on_peers(nearby=nearby):
            log.info("landing_keys", of_their_own=lender.uses_grants)

    watching = (lambda: watch_nearby_writers(env.store, info, on_writers),)
    if not settings.local_prefill_tokens:
        return BuiltWorker(worker, info, watching)
    # It reads from kvstores, and writes to them.
    endpoints = PeerEndpointCache(env.store, env.transfer, info.worker_id, now=env.clock.now)
    return BuiltWorker(worker, info, (*watching, endpoints.keep), (endpoints.metrics,))
