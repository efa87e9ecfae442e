"""Hold the parts of one start of a worker, and what a role builds of them.

process   engine with its model, pool, switch of roles      as long as the process
start     generation, transfer engine, port, record         one for each role change
"""

from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from halfmoon_engine.interface import Engine
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.engine_settings import EngineSettings
from halfmoon_runtime.observability.metrics import MetricSnapshot
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_runtime.worker.forward_thread import ForwardThread
from halfmoon_runtime.worker.open_model import PlacedModel, model_info
from halfmoon_runtime.worker.worker_env import WorkerEnv
from halfmoon_transfer.engine import TransferEngine
from halfmoon_transfer.interface import Transfer
from halfmoon_transfer.regions.region_table import PoolMemory
from halfmoon_workers.start.role_switch import RoleSwitch

WorkerT_co = TypeVar("WorkerT_co", covariant=True)


def _wait_for(transfer: Transfer) -> object:
    return transfer.result()


@dataclass(frozen=True)
class WorkerThreads:
    """Say how a worker computes outside its event loop."""

    #: Makes the thread of the forward passes.
    open_forward: Callable[[], ForwardThread] = ForwardThread
    #: Waits in that thread for a layer that is being read; raises its error.
    wait_for: Callable[[Transfer], object] = _wait_for
    #: Computes checksums, in the order of the calls; None: a thread of its own.
    checksums: Executor | None = None


@dataclass(frozen=True)
class WorkerStart:
    """One start of a worker, with its connections open, not yet known to the cluster."""

    env: WorkerEnv[TransferEngine]
    engine: Engine
    placed: PlacedModel[Any]
    #: The pool, registered in this start's transfer engine.
    memory: PoolMemory
    switch: RoleSwitch = field(default_factory=RoleSwitch)
    #: None: no traces.
    tracer: Tracer | None = None
    #: Computes one stage of a group; `engine` if that has this stage's layers alone; None: the
    #: worker is in no group.
    stage_engine: Engine | None = None
    threads: WorkerThreads = field(default_factory=WorkerThreads)

    def info(self, settings: EngineSettings) -> WorkerInfo:
        """Return the worker's record without what only one role states."""
        info = model_info(self.env.info, settings, self.engine, self.placed.n_pages)
        return msgspec.structs.replace(info, roles=self.switch.record_roles)


@dataclass(frozen=True)
class BuiltWorker(Generic[WorkerT_co]):
    """A worker as one role builds it, which does not serve yet."""

    worker: WorkerT_co
    #: Its record.
    info: WorkerInfo
    #: Run beside it, each until cancelled.
    beside: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    #: Exposed besides those of the worker.
    metrics: tuple[Callable[[], MetricSnapshot], ...] = ()
