"""A soak from its beginning to the audit at its end."""

import asyncio
import random

import msgspec

from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_runtime.channels.network import Network
from halfmoon_testing.kvstore_soak.connections import KvEventListener, SoakConnections
from halfmoon_testing.kvstore_soak.faults import NodeFaultInjector
from halfmoon_testing.kvstore_soak.harness import KvstoreProcesses, SoakHarness, wait_until
from halfmoon_testing.kvstore_soak.model import KvstoreModel
from halfmoon_testing.kvstore_soak.operations import SoakWorker

N_WORKERS = 3


class KvstoreSoakReport(msgspec.Struct, frozen=True):
    """What was done."""

    operations: dict[str, int]
    #: Operations that ended because a node was dead or stood still.
    n_failed: int
    faults: dict[str, int]
    #: Blocks read and compared byte by byte.
    n_verified: int
    #: Reads that found bytes damaged on purpose, by their checksum.
    n_noticed: int
    #: Blocks that a kill took from its node, and that were read from another one meanwhile.
    n_survived: int
    #: Snapshots of a live node compared with what its listener knew.
    n_compared: int
    #: Pins that were made; all had ended at the end.
    n_pinned: int


class KvstoreSoak:
    """One pool under load; may be run several times, one after the other."""

    def __init__(
        self, pool: KvstoreProcesses, network: Network, store: MetadataStore, seed: int
    ) -> None:
        """The nodes are there; `seed` decides what is done to them."""
        self._seed = seed
        ledger = KvstoreModel(pool.names)
        self._scene = SoakHarness(pool, ledger, SoakConnections(network, store))
        self._listeners = {
            name: KvEventListener(network, store, name, ledger) for name in pool.names
        }

    async def run(
        self, n_operations: int, n_between: int, *, kills: bool = True
    ) -> KvstoreSoakReport:
        """Do so many more operations, with one misfortune after each `n_between` of them.

        Args:
            n_operations: how many are to succeed.
            n_between: how many from one misfortune to the next.
            kills: whether nodes are killed, too.

        Returns:
            What was done since the beginning.

        Raises:
            Wrong: a block that is owed was not there, or something did not come to rest.
            WrongBytes: a block had other bytes than were put.
        """
        scene = self._scene
        scene.n_operations = scene.n_done + n_operations
        first = scene.n_done
        misfortunes = NodeFaultInjector(scene, self._dice(first, "misfortunes"), kills=kills)
        workers = [SoakWorker(scene, self._dice(first, f"worker {i}")) for i in range(N_WORKERS)]
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = [tasks.create_task(each.run()) for each in self._listeners.values()]
                if not scene.n_done:
                    await workers[0].preload()
                working = [tasks.create_task(each.run()) for each in workers]
                due = scene.n_done + n_between
                while not all(task.done() for task in working):
                    if scene.n_done >= due:
                        due += n_between
                        await misfortunes.next()
                    await asyncio.sleep(0.01)
                for name in scene.pool.names:
                    await self._audit(name)
                for task in listening:
                    task.cancel()
        finally:
            await scene.connections.close()
        return KvstoreSoakReport(
            operations=dict(scene.done),
            n_failed=scene.n_failed,
            faults=dict(scene.faults),
            n_verified=scene.n_verified,
            n_noticed=scene.n_noticed,
            n_survived=scene.n_survived,
            n_compared=scene.n_compared,
            n_pinned=scene.n_pinned,
        )

    def _dice(self, *names: object) -> random.Random:
        return random.Random(repr((self._seed, *names)))

    async def _audit(self, name: str) -> None:
        """Nothing is held any more, all that is owed is there, and listeners know the truth."""
        scene, listener = self._scene, self._listeners[name]
        for each in scene.prompts:
            await scene.read_eventually("audit", name, each)
        client = await scene.connections.client_for("audit", name, anew=True)

        async def is_at_rest() -> bool:
            stored = await client.stored()
            if await asyncio.to_thread(scene.pool.n_pinned, name):
                return False
            return (
                listener.n_held == 0
                and listener.n_known == len(stored)
                and all(map(listener.knows, stored))
            )

        await wait_until(is_at_rest)
        scene.n_compared += 1
        if absent := scene.model.owed(name) - await client.stored():
            raise scene.broken_promise(f"{name} owes {len(absent)} blocks that it does not have")
