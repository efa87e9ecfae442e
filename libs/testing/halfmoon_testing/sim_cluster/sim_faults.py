"""Disturb a simulated cluster: draw faults from the seed, apply them, and end all of them.

A run has a few faults, each of some seconds, at drawn moments; several may meet. When `run`
returns, every process is up and every fault is over.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.membership import LEASE_S
from halfmoon_scheduling.events import RequestedRole, RoleChangeRequested
from halfmoon_testing.sim_cluster.sim_cluster import SimCluster
from halfmoon_testing.sim_cluster.sim_network import NetworkFaults
from halfmoon_transfer.backends.fault_injection import FaultPlan

#: Seconds that a fault lasts: less than a peer waits for heartbeats, or more.
_SHORT_S, _LONG_S = (0.02, 1.0), (1.0, 5.0)
_START_AGAIN_S = 20.0


class SimFaults:
    """The faults of one run."""

    def __init__(self, cluster: SimCluster, dice: random.Random) -> None:
        """Draw nothing yet."""
        self._cluster = cluster
        self._dice = dice
        self.counts: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[float], Awaitable[None]]] = {
            "kill a worker": self._kill_worker,
            "kill the conductor": self._kill_conductor,
            "pause": self._pause,
            "cut": self._cut,
            "isolate": self._isolate,
            "slow network": self._slow_network,
            "missed events": self._miss_events,
            "lost bytes": self._lose_bytes,
            "damaged bytes": self._damage_bytes,
            "slow bytes": self._slow_bytes,
            "disk fails": self._fail_disk,
            "disk is full": self._fill_disk,
            "disk is slow": self._slow_disk,
            "clock step": self._step_clock,
            "metadata down": self._stop_metadata,
            "metadata loss": self._lose_metadata,
            "metadata is full": self._fill_metadata,
            "kill a rack": self._kill_rack,
            "role change": self._change_role,
        }

    async def run(self) -> None:
        """Apply the faults, and wait until all are over and every process runs."""
        dice = self._dice
        names = dice.choices(list(self._kinds), k=dice.choice((0, 1, 2, 3, 3, 4, 6)))
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                # Most begin while requests are under way: little can go wrong later.
                request_s = dice.choice(self._cluster.planned).at_s
                begin_s = request_s + dice.uniform(0.0, 0.25)
                lasts_s = dice.uniform(*dice.choice((_SHORT_S, _LONG_S)))
                tasks.create_task(self._apply(name, begin_s, lasts_s))
        # The processes that were killed last may be starting still.
        await self._cluster.until(
            lambda: all(each.is_ready for each in self._cluster.services.values()),
            _START_AGAIN_S,
            "killed services start again",
        )

    async def _apply(self, name: str, begin_s: float, lasts_s: float) -> None:
        await asyncio.sleep(begin_s)
        self.counts[name] += 1
        self._cluster.log("fault", f"{name} for {lasts_s:.3f} s")
        await self._kinds[name](lasts_s)
        self._cluster.log("fault", f"{name} is over")

    @property
    def _workers(self) -> list[str]:
        return [name for name in self._cluster.names if not name.startswith("conductor")]

    async def _kill_worker(self, lasts_s: float) -> None:
        await self._kill(self._dice.choice(self._workers), lasts_s)

    async def _kill_rack(self, lasts_s: float) -> None:
        """Kill two to four processes within 200 ms, workers and kvstores alike."""
        names = self._dice.sample(
            self._workers, min(len(self._workers), self._dice.choice((2, 3, 4)))
        )
        delays_s = [self._dice.uniform(0.0, 0.2) for _ in names]

        async def kill_soon(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await self._kill(name, lasts_s)

        async with asyncio.TaskGroup() as tasks:
            for name, delay_s in zip(names, delays_s, strict=True):
                tasks.create_task(kill_soon(name, delay_s))

    async def _kill_conductor(self, lasts_s: float) -> None:
        await self._kill("conductor-0", lasts_s)

    async def _kill(self, name: str, lasts_s: float) -> None:
        service = self._cluster.services[name]
        if service.process.is_dead:
            return  # another fault has just killed it
        if (disk := self._cluster.world.disks.get(name)) is not None:
            disk.torn_rate = 0.5
        self._cluster.log(name, "is killed")
        self._cluster.kill(name)
        await asyncio.sleep(lasts_s)
        self._cluster.start(name)

    async def _change_role(self, lasts_s: float) -> None:
        """Have the conductor ask a worker to take the other role; it may refuse."""
        services = [
            self._cluster.services[name] for name in self._workers if not name.startswith("kvstore")
        ]
        n_by_role = Counter(each.role for each in services)
        # The last one of a role keeps it.
        several = [each for each in services if n_by_role[each.role] > 1]
        service = self._dice.choice(several or services)
        conductor = self._cluster.conductor.conductor
        if conductor is None or self._cluster.conductor.process.is_dead:
            return
        other: RequestedRole = "decode" if service.role == "prefill" else "prefill"
        asked = RoleChangeRequested(WorkerId(service.name), other)
        self._cluster.loop.call_soon(
            conductor.shell.post, asked, context=self._cluster.conductor.process.context
        )
        await asyncio.sleep(lasts_s)

    async def _pause(self, lasts_s: float) -> None:
        name = self._dice.choice(self._cluster.names)
        service = self._cluster.services[name]
        if service.process.is_paused or service.process.is_dead:
            return
        self._cluster.log(name, "stands still")
        self._cluster.loop.pause(service.process)
        self._cluster.network.on_paused(service.process, lasts_s)
        await asyncio.sleep(lasts_s)
        self._cluster.loop.resume(service.process)

    async def _cut(self, lasts_s: float) -> None:
        one, other = self._dice.sample([*self._cluster.names, "metadata", "puts-0"], 2)
        await self._cut_pairs([(one, other)], lasts_s)

    async def _isolate(self, lasts_s: float) -> None:
        names = [*self._cluster.names, "metadata"]
        one = self._dice.choice(self._workers)
        await self._cut_pairs([(one, other) for other in names if other != one], lasts_s)

    async def _cut_pairs(self, pairs: list[tuple[str, str]], lasts_s: float) -> None:
        network = self._cluster.network
        pairs = [pair for pair in pairs if not network.is_cut(*pair)]
        for pair in pairs:
            network.cut(*pair)
            self._cluster.log("fault", f"{pair[0]} and {pair[1]} are cut off")
        await asyncio.sleep(lasts_s)
        for pair in pairs:
            network.heal(*pair)

    async def _slow_network(self, lasts_s: float) -> None:
        faults = self._cluster.network.faults
        longest_s = self._dice.choice((0.02, 0.2, 0.8))
        faults.delay_s = (0.001, longest_s)
        await asyncio.sleep(lasts_s)
        faults.delay_s = NetworkFaults().delay_s
        await asyncio.sleep(longest_s)  # what set out last arrives within it

    async def _miss_events(self, lasts_s: float) -> None:
        self._cluster.network.faults.missed_rate = 0.3
        await asyncio.sleep(lasts_s)
        self._cluster.network.faults.missed_rate = 0.0

    async def _lose_bytes(self, lasts_s: float) -> None:
        await self._with_plan(lasts_s, drop_rate=self._dice.choice((0.1, 0.4)))

    async def _damage_bytes(self, lasts_s: float) -> None:
        await self._with_plan(lasts_s, corrupt_rate=self._dice.choice((0.1, 0.4)))

    async def _with_plan(self, lasts_s: float, **rates: float) -> None:
        path = self._cluster.world.path
        path.plan = msgspec.structs.replace(path.plan, **rates)
        await asyncio.sleep(lasts_s)
        none = {name: getattr(FaultPlan(), name) for name in rates}
        path.plan = msgspec.structs.replace(path.plan, **none)

    async def _slow_bytes(self, lasts_s: float) -> None:
        path = self._cluster.world.path
        longest_s = self._dice.choice((0.05, 0.5, 2.0))
        path.carry_range_s = (0.0001, longest_s)
        await asyncio.sleep(lasts_s)
        path.carry_range_s = (0.0001, 0.002)
        await asyncio.sleep(longest_s)

    async def _fail_disk(self, lasts_s: float) -> None:
        for disk in self._cluster.world.disks.values():
            disk.failure_rate = 0.3
        await asyncio.sleep(lasts_s)
        for disk in self._cluster.world.disks.values():
            disk.failure_rate = 0.0

    async def _fill_disk(self, lasts_s: float) -> None:
        for disk in self._cluster.world.disks.values():
            disk.is_full = True
        await asyncio.sleep(lasts_s)
        for disk in self._cluster.world.disks.values():
            disk.is_full = False

    async def _slow_disk(self, lasts_s: float) -> None:
        longest_s = self._dice.choice((0.5, 2.0))
        for disk in self._cluster.world.disks.values():
            disk.slow_s = (0.2, longest_s)
        await asyncio.sleep(lasts_s)
        for disk in self._cluster.world.disks.values():
            disk.slow_s = None
        await asyncio.sleep(longest_s)

    async def _step_clock(self, lasts_s: float) -> None:
        service = self._cluster.services[self._dice.choice(self._cluster.names)]
        service.wall_error_s += self._dice.uniform(-1e5, 1e5)
        await asyncio.sleep(lasts_s)

    async def _stop_metadata(self, lasts_s: float) -> None:
        self._cluster.metadata.is_down = True
        await asyncio.sleep(lasts_s)
        self._cluster.metadata.is_down = False

    async def _fill_metadata(self, lasts_s: float) -> None:
        self._cluster.metadata.is_full = True
        # Longer than a lease: records that are not renewed are gone by then.
        await asyncio.sleep(lasts_s + LEASE_S)
        self._cluster.metadata.is_full = False

    async def _lose_metadata(self, lasts_s: float) -> None:
        self._cluster.metadata.is_down = True
        await asyncio.sleep(lasts_s)
        self._cluster.metadata.lose_everything()
        self._cluster.metadata.is_down = False
