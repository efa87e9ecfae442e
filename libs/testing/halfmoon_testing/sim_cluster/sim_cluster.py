"""Hold one simulated cluster: its services, its clients, its network and its log."""

import asyncio
import random

from halfmoon_runtime.task_errors import leaf_errors
from halfmoon_testing.sim_cluster.sim_clients import SimulatedClients, draw_requests
from halfmoon_testing.sim_cluster.sim_metadata import SimMetadataServer
from halfmoon_testing.sim_cluster.sim_network import SimNetwork
from halfmoon_testing.sim_cluster.sim_puts import SimPuts
from halfmoon_testing.sim_cluster.sim_services import SimService, SimWorld
from halfmoon_testing.sim_cluster.sim_shape import ClusterShape, draw_shape
from halfmoon_testing.sim_cluster.violation import Violation
from halfmoon_testing.sim_cluster.virtual_loop import VirtualLoop


class SimCluster:
    """One cluster, its clients and its faults."""

    def __init__(self, seed: int, *, with_log: bool = False) -> None:
        """Draw everything from the seed; nothing runs yet."""
        self.seed = seed
        self.with_log = with_log
        self.log_lines: list[str] = []
        self.shape: ClusterShape = draw_shape(random.Random(f"{seed}/shape"))
        self.loop = VirtualLoop(random.Random(f"{seed}/order"))
        dice = random.Random(f"{seed}/wire")
        self.network = SimNetwork(self.loop, dice, self.log)
        self.metadata = SimMetadataServer(self.loop.time)
        self.world = SimWorld(
            self.loop,
            dice,
            self.shape,
            self.network,
            self.metadata,
            random.Random(f"{seed}/late"),
        )
        self.services: dict[str, SimService] = {}
        #: Every start of a service, dead ones included.
        self.starts: list[SimService] = []
        self.clients = SimulatedClients(self.world)
        self.puts = SimPuts(self.world, self.services, random.Random(f"{seed}/puts"))
        self.planned = draw_requests(random.Random(f"{seed}/requests"), self.shape)

    def log(self, who: str, what: str) -> None:
        """Add a line to the log, if one is kept."""
        if self.with_log:
            self.log_lines.append(f"{self.loop.time():12.6f} {who:12} {what}")

    @property
    def names(self) -> list[str]:
        """The names of all services."""
        shape = self.shape
        return [
            "conductor-0",
            *(f"kvstore-{i}" for i in range(shape.n_kvstore)),
            *(f"prefill-{i}" for i in range(shape.n_prefill)),
            *(f"decode-{i}" for i in range(shape.n_decode)),
        ]

    def start(self, name: str) -> SimService:
        """Start a service, or start it again."""
        service = SimService(self.world, name, name.partition("-")[0])
        self.services[name] = service
        self.starts.append(service)
        service.start()
        self.log(name, "starts")
        return service

    def kill(self, name: str) -> None:
        """Kill a service."""
        service = self.services[name]
        if not service.process.is_dead:
            service.kill()
            if service.role == "conductor":
                self.clients.on_conductor_killed(service)

    @property
    def conductor(self) -> SimService:
        """The conductor of this moment."""
        return self.services["conductor-0"]

    def is_whole(self) -> bool:
        """Return whether the conductor uses all workers."""
        parts = self.conductor.conductor
        if parts is None or self.conductor.process.is_dead:
            return False
        cluster, shape = parts.core.cluster, self.shape
        n_prefill, n_decode = (len(cluster.accepting(role)) for role in ("prefill", "decode"))
        return (
            # Some may have changed their roles.
            min(n_prefill, n_decode) > 0
            and n_prefill + n_decode == shape.n_prefill + shape.n_decode
            and len(cluster.accepting("kvstore")) == shape.n_kvstore
        )

    async def until(
        self, condition: "object", limit_s: float, what: str, more: "object" = lambda: ""
    ) -> None:
        """Wait for a condition.

        Raises:
            Violation: it does not hold in time.
        """
        assert callable(condition) and callable(more)
        limit_s += self.loop.time()
        while not condition():
            if self.loop.time() > limit_s:
                raise Violation("ends within its bound", f"not so in time: {what} {more()}")
            for service in self.services.values():
                task = service.task
                if task is not None and task.done() and not service.process.is_dead:
                    raise Violation("services go on", f"{service.name} ended: {_error_of(task)}")
            await asyncio.sleep(0.02)


def _error_of(task: "asyncio.Task[None]") -> str:
    error = None if task.cancelled() else task.exception()
    return repr(None if error is None else leaf_errors(error)[0])
