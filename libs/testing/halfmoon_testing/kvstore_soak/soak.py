"""Run a soak of kvstore nodes, and audit the nodes at the end."""

import asyncio
import random

import msgspec

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_runtime.channels.network import Network
from halfmoon_runtime.task_errors import raising_task_errors
from halfmoon_testing.kvstore_soak.connections import KvEventListener, SoakConnections
from halfmoon_testing.kvstore_soak.faults import NodeFaultInjector
from halfmoon_testing.kvstore_soak.harness import KvstoreProcesses, SoakHarness, wait_until
from halfmoon_testing.kvstore_soak.model import KvstoreModel
from halfmoon_testing.kvstore_soak.operations import SoakWorker

N_WORKERS = 3


class KvstoreSoakReport(msgspec.Struct, frozen=True):
    """Counts of a soak since its start."""

    operations: dict[str, int]
    #: Operations that failed because a node was dead or stopped.
    n_failed: int
    faults: dict[str, int]
    #: Blocks read and compared byte by byte.
    n_verified: int
    #: Reads that found bytes damaged on purpose, by the checksum.
    n_noticed: int
    #: Blocks of killed nodes that were read from another node meanwhile.
    n_survived: int
    #: Snapshots of a live node compared with its listener's view.
    n_compared: int
    #: Pins that were set; all had expired at the end.
    n_pinned: int


class KvstoreSoak:
    """Soak one pool of nodes; `run` may be called several times, one after the other."""

    def __init__(
        self, pool: KvstoreProcesses, network: Network, store: MetadataStore, seed: int
    ) -> None:
        """Use these running nodes; `seed` determines all random choices."""
        self._seed = seed
        model = KvstoreModel(pool.names)
        self._harness = SoakHarness(pool, model, SoakConnections(network, store))
        self._listeners = {
            name: KvEventListener(network, store, name, model) for name in pool.names
        }

    async def run(
        self, n_operations: int, n_between: int, *, kills: bool = True
    ) -> KvstoreSoakReport:
        """Do so many more operations, with one fault after each `n_between` of them.

        Args:
            n_operations: number of operations that must succeed.
            n_between: operations from one fault to the next.
            kills: whether nodes are killed, too.

        Returns:
            Counts since the start of the soak.

        Raises:
            PromiseBroken: a node did not serve a block that it owes.
            TimeoutError: the nodes did not settle.
            WrongBytes: a block had wrong bytes.
        """
        harness = self._harness
        harness.n_operations = harness.n_done + n_operations
        first = harness.n_done
        faults = NodeFaultInjector(harness, self._random(first, "faults"), kills=kills)
        workers = [
            SoakWorker(harness, self._random(first, f"worker {i}")) for i in range(N_WORKERS)
        ]
        try:
            with raising_task_errors():
                async with asyncio.TaskGroup() as tasks:
                    listening = [tasks.create_task(each.run()) for each in self._listeners.values()]
                    if not harness.n_done:
                        await workers[0].preload()
                    working = [tasks.create_task(each.run()) for each in workers]
                    due = harness.n_done + n_between
                    while not all(task.done() for task in working):
                        if harness.n_done >= due:
                            due += n_between
                            await faults.next()
                        await asyncio.sleep(0.01)
                    for name in harness.pool.names:
                        await self._audit(name)
                    for task in listening:
                        task.cancel()
        finally:
            await harness.connections.close()
        return KvstoreSoakReport(
            operations=dict(harness.done),
            n_failed=harness.n_failed,
            faults=dict(harness.faults),
            n_verified=harness.n_verified,
            n_noticed=harness.n_noticed,
            n_survived=harness.n_survived,
            n_compared=harness.n_compared,
            n_pinned=harness.n_pinned,
        )

    def _random(self, *names: object) -> random.Random:
        return random.Random(repr((self._seed, *names)))

    async def _audit(self, name: str) -> None:
        """Check a node at the end: no leases, all owed blocks, and a listener that agrees."""
        harness, listener = self._harness, self._listeners[name]
        for each in harness.prompts:
            await harness.read_eventually("audit", name, each)
        client = await harness.connections.client_for("audit", name, anew=True)

        async def is_at_rest() -> bool:
            stored = await client.stored()
            if await asyncio.to_thread(harness.pool.n_pinned, name):
                return False
            return (
                listener.n_held == 0
                and listener.n_known == len(stored)
                and all(map(listener.knows, stored))
            )

        await wait_until(is_at_rest)
        harness.n_compared += 1
        if absent := harness.model.owed(name) - await client.stored():
            raise harness.broken_promise(f"{name} owes {len(absent)} blocks that it does not have")
