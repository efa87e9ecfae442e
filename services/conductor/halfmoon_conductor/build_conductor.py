"""Build the parts of a conductor that decide and act: core, shell, links to workers, gateway.

The service, tests in one process and the seeded simulation build them here; REST is the service's.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.observability.tracing.tracing_setup import TracingSetup
from halfmoon_conductor.workers.conductor_presence import ConductorPresence
from halfmoon_conductor.workers.shell import Recorder, Shell
from halfmoon_conductor.workers.unreachable_workers import UnreachableWorkers
from halfmoon_conductor.workers.worker_links import MAX_LINKS, WorkerLinks
from halfmoon_metadata import MetadataStore
from halfmoon_protocol.ids import ConductorId
from halfmoon_runtime.channels.network import Network
from halfmoon_runtime.clock import Clock, SystemClock
from halfmoon_runtime.observability.metrics import expose_metrics
from halfmoon_runtime.observability.tracing import Tracer
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig


@dataclass(frozen=True)
class BuiltConductor:
    """The parts of a conductor that runs nothing yet."""

    core: Conductor
    shell: Shell
    gateway: CoreGateway
    links: WorkerLinks
    observer: CoreObserver
    traced: TracingSetup
    unreachable: UnreachableWorkers
    #: The conductor's record.
    presence: ConductorPresence
    #: Has the metrics of all of these.
    registry: CollectorRegistry
    clock: Clock

    async def run(self) -> None:
        """Follow the cluster's workers until cancelled.

        Raises:
            CoreBroken: nothing is decided right any more; streams go on elsewhere.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.links.run())
            tasks.create_task(self.presence.keep())
            tasks.create_task(self.shell.until_broken())


def build_conductor(
    conductor_id: ConductorId,
    store: MetadataStore,
    network: Network,
    config: SchedulingConfig,
    *,
    clock: Clock | None = None,
    wall_clock: Callable[[], float] = time.time,
    late_s: Callable[[], float] = lambda: 0.0,
    recorders: Sequence[Recorder] = (),
    tracer: Tracer | None = None,
    served_model_name: str = "",
    decode_stall_s: float = 0.0,
    max_links: int = MAX_LINKS,
) -> BuiltConductor:
    """Build the parts of a conductor, and connect them.

    Args:
        conductor_id: its name.
        store: the metadata server.
        network: leads to workers.
        config: of the core.
        clock: of all times; None: the machine's.
        wall_clock: seconds since 1970.
        late_s: seconds by which the event loop is late now.
        recorders: told of each event and its commands, before all others.
        tracer: makes spans; None: no traces.
        served_model_name: as clients write it; empty: as workers do.
        decode_stall_s: seconds without a token after which a decode worker hangs; 0: never.
        max_links: most workers that it keeps links to.
    """
    clock = clock or SystemClock()
    core = Conductor(config)
    observer = CoreObserver(core, LatencyHistory(clock.now))
    traced = TracingSetup(tracer, core, clock)
    shell = Shell(core, clock, recorders=[*recorders, *traced.recorders, observer.record])
    unreachable = UnreachableWorkers(clock.now)
    gateway = CoreGateway(
        shell,
        served_model_name=served_model_name,
        wall_clock=wall_clock,
        unreachable=unreachable,
        late_s=late_s,
    )
    registry = CollectorRegistry()
    metrics = ClusterMetrics(core, registry, wall_clock)
    expose_metrics(unreachable.metrics, registry=registry)
    shell.add_recorder(metrics.record)
    links = WorkerLinks(
        network,
        store,
        conductor_id,
        shell,
        gateway,
        metrics,
        decode_stall_s,
        unreachable,
        max_links=max_links,
    )
    shell.connect(traced.workers(links), gateway)
    presence = ConductorPresence(store, conductor_id, unreachable)
    return BuiltConductor(
        core, shell, gateway, links, observer, traced, unreachable, presence, registry, clock
    )
