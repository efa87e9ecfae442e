"""Build a decode worker: open its parts in order, close them in reverse."""

import msgspec

from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_runtime.clock import SystemClock
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


async def run(settings: DecodeSettings, service: Service) -> None:
    """Run a decode worker until the service is told to stop, then finish its requests."""
    async with opened_tracer(settings, "halfmoon-decode") as tracer:
        engine = await load_model(settings, service, open_engine, ModelError)
        async with (
            open_worker(settings, service, "decode", open_transfer_engine) as opened,
            place_model(
                settings,
                service,
                engine,
                opened.transfer.allocate,
                opened.transfer.register_device,
            ) as placed,
        ):
            info = msgspec.structs.replace(
                model_info(opened.info, settings, engine, placed.n_pages),
                decode_cost=placed.decode_cost,
            )
            worker = DecodeWorker(
                port=opened.port,
                engine=engine,
                region=placed.memory.region,
                info=info,
                settings=settings,
                clock=SystemClock(),
                pages=PageAllocator(placed.n_pages),
                spans=DecodeSpans(tracer),
                watch=placed.watch,
            )
            leaving = msgspec.structs.replace(info, draining=True)
            await opened.serve(
                worker,
                Membership(opened.store, info),
                lambda: worker.drain(leaving, settings.drain_s),
                n_pages=placed.n_pages,
            )
