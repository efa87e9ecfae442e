"""Hold what one start of a worker stands on: metadata store, network, transfer engine, clock.

Services open it on real parts, tests in one process on others, the seeded simulation on virtual
ones. All of them build the same workers on it: `build_prefill`, `build_decode`, `build_kvstore`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from halfmoon_metadata import MetadataStore
from halfmoon_protocol import features
from halfmoon_protocol.ids import WorkerId
from halfmoon_protocol.messages import Role, WorkerInfo
from halfmoon_protocol.versions import MAX_VERSION, MIN_VERSION
from halfmoon_runtime.channels.network import Network, Port
from halfmoon_runtime.clock import Clock, SystemClock
from halfmoon_runtime.membership import (
    LEASE_S,
    Membership,
    list_members,
    next_generation,
    until_done,
)
from halfmoon_runtime.observability.transfer_metrics import TransferCounts


class UsedTransferEngine(Protocol):
    """A transfer engine, as far as this library uses it: its counters, and its record."""

    def stats(self) -> TransferCounts:
        """Return the counters since the engine was opened."""
        ...

    def restore_record(self) -> None:
        """Write the engine's record, which the metadata server may have lost."""
        ...


EngineT = TypeVar("EngineT", bound=UsedTransferEngine)


@dataclass(frozen=True)
class WorkerEnv(Generic[EngineT]):
    """One start of a worker with its connections open, not yet known to the cluster."""

    store: MetadataStore
    network: Network
    transfer: EngineT
    port: Port
    #: The worker's record without what only its service knows, such as layout and costs.
    info: WorkerInfo
    clock: Clock = field(default_factory=SystemClock)
    #: Of the record in the metadata server.
    lease_s: float = LEASE_S

    def membership(self, info: WorkerInfo) -> Membership:
        """Return the record of this start in the metadata server, not yet written.

        A server that has lost its data gets the transfer engine's record back first.
        """
        return Membership(
            self.store,
            info,
            ttl_s=self.lease_s,
            now=self.clock.now,
            restore=self.transfer.restore_record,
        )

    async def members(self) -> list[WorkerInfo]:
        """Return the records of all members.

        Raises:
            MetadataError: the metadata server does not answer.
        """
        return list((await list_members(self.store)).values())


async def open_env(
    worker_id: WorkerId,
    role: Role,
    store: MetadataStore,
    network: Network,
    open_transfer: Callable[[int], Awaitable[EngineT]],
    *,
    host_id: str,
    host: str = "127.0.0.1",
    above: int = 0,
    clock: Clock | None = None,
    lease_s: float = LEASE_S,
) -> WorkerEnv[EngineT]:
    """Count a start of a worker, and open what it stands on.

    Args:
        worker_id: its name.
        role: what it does in this start.
        store: the metadata server; it is waited for.
        network: opens the port.
        open_transfer: opens the transfer engine of the generation that it gets.
        host_id: machine id, for the record.
        host: address to listen on.
        above: generation of an earlier start in this process; the new one is higher.
        clock: of all times; None: the machine's.
        lease_s: seconds of the lease in the metadata server.

    Raises:
        ImplausibleGeneration: this worker's record in the metadata server makes no sense.
    """
    generation = await next_generation(store, worker_id, above=above)
    # The server may have gone away since it counted this start.
    transfer = await until_done(f"segment of {worker_id}", lambda: open_transfer(generation))
    port = await network.bind(worker_id, host=host)
    info = WorkerInfo(
        worker_id=worker_id,
        role=role,
        generation=generation,
        host=host_id,
        commands=port.commands,
        events=port.events,
        key_id=port.key_id,
        min_version=MIN_VERSION,
        max_version=MAX_VERSION,
        features=() if role == "kvstore" else features.ALL,
    )
    return WorkerEnv(store, network, transfer, port, info, clock or SystemClock(), lease_s)
