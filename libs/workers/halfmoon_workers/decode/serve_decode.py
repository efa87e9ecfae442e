"""Build a decode worker from the parts of a start, and serve until it is to leave."""

from contextlib import AsyncExitStack

import msgspec
import structlog

from halfmoon_prefix_cache.block_put import BlockPutter
from halfmoon_prefix_cache.replica_selector import ReplicaSelector
from halfmoon_protocol.ids import RequestId
from halfmoon_runtime.clock import SystemClock
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
from halfmoon_workers.start.worker_start import WorkerStart

log = structlog.get_logger()


async def serve_decode(start: WorkerStart, settings: DecodeSettings) -> int:
    """Run a decode worker until it is to leave, then finish its requests.

    Returns:
        How many landings were given up unfinished: their writers may not have stopped yet.
    """
    opened, placed, clock = start.opened, start.placed, SystemClock()
    async with AsyncExitStack() as stack:
        kvstores = KvstoreClients(opened.network, settings.kvstore_timeout_s)
        stack.push_async_callback(kvstores.close)
        replicas = ReplicaSelector(kvstores, start.engine.layout, clock)
        putter = BlockPutter(replicas, opened.transfer, start.memory, start.engine.layout)
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
            lender = GrantLender[RequestId](
                opened.transfer, start.memory.region, settings.transfer_grants
            )
        except ValueError as error:
            raise CannotStart(str(error)) from error
        worker = DecodeWorker(
            port=opened.port,
            engine=start.engine,
            region=start.memory.region,
            info=info,
            settings=settings,
            clock=clock,
            pages=PageAllocator(placed.n_pages),
            role_switch=start.switch,
            spans=DecodeSpans(start.tracer),
            lender=lender,
            watch=placed.watch,
            putter=putter if settings.keep_answers else None,
            prefill_parts=LocalPrefillParts(opened.transfer, start.memory, replicas, start.tracer),
        )

        def on_writers(nearby: bool) -> None:
            if lender.on_peers(nearby=nearby):
                log.info("landing_keys", of_their_own=lender.uses_grants)

        watching = watch_nearby_writers(opened.store, info, on_writers)
        await stack.enter_async_context(opened.service.running(watching))
        metrics = []
        if settings.local_prefill_tokens:  # it reads from kvstores, and writes to them
            endpoints = PeerEndpointCache(opened.store, opened.transfer, info.worker_id)
            await stack.enter_async_context(opened.service.running(endpoints.keep()))
            metrics.append(endpoints.metrics)
        await start.serve(
            worker,
            info,
            lambda leaving: worker.drain(leaving, settings.drain_s),
            *metrics,
        )
        return worker.batch.n_reserved
