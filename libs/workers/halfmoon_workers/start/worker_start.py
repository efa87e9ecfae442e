"""Hold the parts of one start of a worker, and serve until it is to leave.

process   engine with its model, pool, switch of roles      as long as the process
start     generation, transfer engine, port, record         one for each role change
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog

from halfmoon_engine.interface import Engine
from halfmoon_metadata.store_interface import MetadataError
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.membership import Membership, list_members
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.open_model import PlacedModel, model_info
from halfmoon_runtime.worker.open_worker import GreetedWorker, OpenedWorker
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_transfer.regions.shared_memory import SharedMemory
from halfmoon_workers.start.role_switch import RoleSwitch
from halfmoon_workers.start.worker_pool import DevicePool

log = structlog.get_logger()


@dataclass(frozen=True)
class WorkerStart:
    """One start of a worker, with its connections open, not yet known to the cluster."""

    opened: OpenedWorker[TransferEngine]
    engine: Engine
    placed: PlacedModel[SharedMemory | DevicePool]
    #: The pool, registered in this start's transfer engine.
    memory: PoolMemory
    switch: RoleSwitch
    #: None: no traces.
    tracer: Tracer | None = None
    #: Computes one stage of a group; `engine` if that has this stage's layers alone; None: the
    #: worker is in no group.
    stage_engine: Engine | None = None

    def info(self, settings: EngineSettings) -> WorkerInfo:
        """Return the worker's record without what only one role states."""
        info = model_info(self.opened.info, settings, self.engine, self.placed.n_pages)
        return msgspec.structs.replace(info, roles=self.switch.record_roles)

    async def serve(
        self,
        worker: GreetedWorker,
        info: WorkerInfo,
        drain: Callable[[WorkerInfo], Awaitable[None]],
        *metrics: Callable[[], MetricSnapshot],
    ) -> None:
        """Register the worker, and serve until it is stopped or to change its role; drain it.

        Args:
            worker: answers commands, and has metrics.
            info: its record.
            drain: announces this record, and finishes what the worker holds.
            metrics: further metrics to expose.

        Raises:
            Superseded: a later start of this worker is registered.
        """
        membership = self.opened.membership(info)
        named = {"role": info.role, "generation": info.generation} if info.roles else {}
        await self.opened.serve(
            worker,
            membership,
            lambda: drain(msgspec.structs.replace(info, draining=True)),
            self.switch.metrics,
            *metrics,
            until=lambda: self._until_leaving(membership),
            n_pages=self.placed.n_pages,
            kv_tokens=self.placed.n_pages * self.engine.layout.block_size,
            max_context=self.engine.max_context,
            token_bytes=self.engine.layout.token_bytes,
            dtype=self.engine.layout.dtype,
            **named,
        )

    async def _until_leaving(self, membership: Membership) -> None:
        """Wait for the signal to stop, or for a change of role that the cluster can afford."""
        self.switch.on_serving()
        stopped = asyncio.create_task(self.opened.service.stopping.wait())
        wanted = asyncio.create_task(self._until_spared(membership))
        try:
            done, _ = await asyncio.wait({stopped, wanted}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (stopped, wanted):
                task.cancel()
            await asyncio.wait((stopped, wanted))  # a cancellation of this wait is not lost

    async def _until_spared(self, membership: Membership) -> None:
        """Wait for a change of role while another worker of the present role takes requests.

        Each worker announces that it leaves before it looks for another one. So of two that are
        told to leave at once, at most both stay.
        """
        info = membership.info
        while True:
            role = await self.switch.wait()
            await membership.update(msgspec.structs.replace(info, draining=True))
            try:
                others = await list_members(self.opened.store)
            except MetadataError as error:
                refusal = f"the metadata server can't be asked for other workers: {error}"
            else:
                if any(_replaces(info, other) for other in others.values()):
                    return
                refusal = f"it is the last {info.role} worker, so none would be left"
            await membership.update(info)
            self.switch.withdraw(refusal)
            log.info("role_kept", role=info.role, wanted=role)


def _replaces(info: WorkerInfo, other: WorkerInfo) -> bool:
    """Return whether another worker takes requests in the same role."""
    return (
        other.worker_id != info.worker_id
        and other.role == info.role
        and not other.draining
        and not other.server
    )
