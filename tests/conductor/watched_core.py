"""A core with its shell, gateway, links and observer, around a network of the test's own."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from halfmoon_conductor.generation.core_gateway import CoreGateway
from halfmoon_conductor.observability.history.latency_history import LatencyHistory
from halfmoon_conductor.observability.history.observer import CoreObserver
from halfmoon_conductor.observability.metrics.cluster_metrics import ClusterMetrics
from halfmoon_conductor.workers.shell import Shell
from halfmoon_conductor.workers.unreachable_workers import UnreachableWorkers
from halfmoon_conductor.workers.worker_links import WorkerLinks
from halfmoon_metadata import MemoryStore
from halfmoon_protocol.ids import ConductorId, RequestId, WorkerId
from halfmoon_protocol.messages import DecodeReserved, ToConductor
from halfmoon_runtime.channels.memory_network import MemoryNetwork
from halfmoon_runtime.clock import FakeClock
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import AnyEvent, MessageReceived, RequestArrived, WorkerJoined
from halfmoon_testing.scheduling_inputs import a_landing, a_prefill_done, a_request, a_worker


class LinkedCore:
    """All of a conductor but its front, and the store in which workers register."""

    def __init__(self, network: Any, clock: Any, **config: Any) -> None:
        self.network, self.clock, self.store = network, clock, MemoryStore()
        self.core = Conductor(SchedulingConfig(**config))
        self.unreachable = UnreachableWorkers(clock.now)
        self.shell = Shell(self.core, clock)
        self.observer = CoreObserver(self.core, LatencyHistory())
        self.gateway = CoreGateway(self.shell, unreachable=self.unreachable)
        metrics = ClusterMetrics(self.core, CollectorRegistry())
        parts = network, self.store, ConductorId("conductor-0"), self.shell, self.gateway, metrics
        self.links = WorkerLinks(*parts, unreachable=self.unreachable)
        self.shell.connect(self.links, self.gateway)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the links do."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)


class WatchedCore(LinkedCore):
    """A core whose every event is observed."""

    def __init__(self, now: float = 100.0, **config: Any) -> None:
        super().__init__(MemoryNetwork(), FakeClock(5.0), **config)
        self.now = now

    def handle(self, event: AnyEvent) -> None:
        """Let an event happen now."""
        self.observer.record(self.now, event, self.core.handle(event, self.now))

    def join(self, *names: str, **more: Any) -> None:
        """Let workers join."""
        for name in names:
            self.handle(WorkerJoined(a_worker(name, **more)))

    def hear(self, worker: str, message: ToConductor) -> None:
        """Let a worker say something."""
        self.handle(MessageReceived(WorkerId(worker), message))

    def serve(self, request_id: str, *, n_cached: int = 0) -> None:
        """Serve a request of 40 tokens from its arrival to its first token."""
        self.handle(RequestArrived(a_request(request_id)))
        self.reserve(request_id)
        self.prefill(request_id, n_cached=n_cached)

    def reserve(self, request_id: str) -> None:
        """Let decode-0 grant what was asked for."""
        name, landing = RequestId(request_id), a_landing("decode-0")
        self.hear("decode-0", DecodeReserved(request_id=name, landing=landing, expires_s=60.0))

    def prefill(self, request_id: str, *, n_cached: int = 0, compute_s: float = 0.4) -> None:
        """Let prefill-0 be done."""
        done = a_prefill_done(request_id, compute_s=compute_s)
        self.hear("prefill-0", msgspec.structs.replace(done, n_cached=n_cached))
