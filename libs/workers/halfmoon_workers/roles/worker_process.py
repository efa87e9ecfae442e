"""Run a worker's process: load the model once, then serve in one role after another.

A change of role is a new start of the worker, in the same process. All that others know of a start
ends with it: its record, port, connections, requests and region keys. Model, pool, measured costs
and the watch over forward passes stay.
"""

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial

import structlog

from halfmoon_engine.interface import Engine
from halfmoon_engine.load import open_engine
from halfmoon_models.errors import ModelError
from halfmoon_protocol.messages import Role
from halfmoon_runtime.lifecycle import Service
from halfmoon_runtime.observability.tracer_setup import opened_tracer
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.open_model import PlacedModel, load_model, place_model
from halfmoon_runtime.worker.open_worker import open_worker
from halfmoon_transfer.open_transfer_engine import open_transfer_engine
from halfmoon_transfer.regions.shared_memory import SharedMemory
from halfmoon_workers.decode.build_decode import build_decode
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.build_prefill import build_prefill
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.prefill.stage_engine import open_stage
from halfmoon_workers.roles.role_settings import roles_of
from halfmoon_workers.start.pool_pages import choose_pages
from halfmoon_workers.start.role_change_times import RoleChangeTimes
from halfmoon_workers.start.role_switch import RoleSwitch
from halfmoon_workers.start.serve_worker import serve_worker
from halfmoon_workers.start.worker_pool import DevicePool, WorkerPool
from halfmoon_workers.start.worker_start import WorkerStart

log = structlog.get_logger()


async def run_worker(
    settings: PrefillSettings | DecodeSettings, service: Service, role: Role
) -> None:
    """Run a worker until the service is told to stop, then finish its requests.

    Args:
        settings: of the role, and of the other one too if the worker can change.
        service: the worker's process.
        role: the role of its first start.
    """
    async with AsyncExitStack() as stack:
        tracer = await stack.enter_async_context(opened_tracer(settings, f"halfmoon-{role}"))
        engine, stage_engine = await _open_engines(settings, service)
        roles = {role, *roles_of(settings)}
        n_pages = choose_pages(settings, engine, "decode" if "decode" in roles else "prefill")
        pool = WorkerPool()
        stack.callback(pool.close)
        placed = await stack.enter_async_context(
            place_model(settings, service, engine, n_pages, pool.allocate, pool.keep_device)
        )
        times = RoleChangeTimes(tracer=tracer)
        switch = RoleSwitch(role, roles_of(settings), settings.role_cooldown_s, times=times)
        process = _Process(settings, service, engine, pool, placed, switch, tracer, stage_engine)
        while True:
            quarantine_s = await process.serve_once(role)
            if service.stopping.is_set():
                return
            service.starting()
            switch.times.next_phase()
            if quarantine_s:
                log.info("pool_rests", worker_id=settings.worker_id, seconds=quarantine_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(quarantine_s):
                    await service.stopping.wait()
                    return
            before, role = role, switch.complete()
            log.info("role_changes", worker_id=settings.worker_id, before=before, role=role)


async def _open_engines(
    settings: PrefillSettings | DecodeSettings, service: Service
) -> tuple[Engine, Engine | None]:
    """Return the engine of all layers and that of the stage; one of the stage alone is both."""
    stage = settings.stage_record if isinstance(settings, PrefillSettings) else None
    if stage is None:
        return await load_model(settings, service, open_engine, ModelError), None
    if isinstance(settings, PrefillSettings) and settings.stage_layers_only:
        open_part = partial(open_engine, stage_index=stage.index, n_stages=stage.n_stages)
        part: Engine = await load_model(settings, service, open_part, ModelError)
        return part, part
    whole: Engine = await load_model(settings, service, open_engine, ModelError)
    return whole, await open_stage(whole, stage)


class _Process:
    """Hold what all starts of a process share."""

    def __init__(
        self,
        settings: PrefillSettings | DecodeSettings,
        service: Service,
        engine: Engine,
        pool: WorkerPool,
        placed: PlacedModel[SharedMemory | DevicePool],
        switch: RoleSwitch,
        tracer: Tracer | None,
        stage_engine: Engine | None,
    ) -> None:
        self._settings = settings
        self._service = service
        self._engine = engine
        self._pool = pool
        self._placed = placed
        self._switch = switch
        self._tracer = tracer
        self._stage_engine = stage_engine
        #: Of the last start; the metadata server may have lost its counters since.
        self._generation = 0

    async def serve_once(self, role: Role) -> float:
        """Serve in this role until it is to be left; return the seconds for which the pool rests.

        It rests when a landing was given up: its writer has been told to stop, and may have mapped
        the memory.
        """
        settings = self._settings
        async with open_worker(
            settings, self._service, role, open_transfer_engine, above=self._generation
        ) as opened:
            self._generation = opened.env.info.generation
            start = WorkerStart(
                opened.env,
                self._engine,
                self._placed,
                await asyncio.to_thread(self._pool.register, opened.env.transfer),
                self._switch,
                self._tracer,
                self._stage_engine,
            )
            async with AsyncExitStack() as stack:
                if role == "prefill":
                    assert isinstance(settings, PrefillSettings), "no settings of prefill"
                    prefill = build_prefill(start, settings, stack)
                    await serve_worker(opened, start, prefill, settings.drain_s)
                    return 0.0
                assert isinstance(settings, DecodeSettings), "no settings of decode"
                decode = build_decode(start, settings, stack)
                await serve_worker(opened, start, decode, settings.drain_s)
                return settings.quarantine_s if decode.worker.batch.n_reserved else 0.0
