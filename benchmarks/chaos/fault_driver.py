"""Apply a plan of faults to a cluster, and start again whatever ended."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.chaos.chaos_cluster import ChaosCluster
from benchmarks.chaos.fault_plan import Fault
from benchmarks.chaos.ledger import ChaosLedger

#: Seconds that a process may take to end after SIGTERM: its drain, and some.
_ENDS_WITHIN_S = 45.0
_WATCH_S = 0.2
#: Seconds after which a process that ended without a fault is started again.
_RESTART_S = 1.0


class FaultDriver:
    """The faults of one run."""

    def __init__(
        self, cluster: ChaosCluster, ledger: ChaosLedger, say: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._ledger = ledger
        self._say = say
        #: Processes under a fault, which `watch` leaves alone.
        self._busy: set[str] = set()
        self._kinds: dict[str, Callable[[str, float], Awaitable[None]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "restart": self._restart,
            "redis stalled": self._stall_redis,
            "redis cut": self._cut_redis,
            "redis killed": self._kill_redis,
            "redis emptied": self._empty_redis,
            "redis paused": self._pause_redis,
        }

    async def run(self, faults: Sequence[Fault], began_s: float) -> None:
        """Apply the faults at their moments; return when all are over."""
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                tasks.create_task(self._apply(fault, began_s))

    async def watch(self) -> None:
        """Note who is ready, and start processes again that ended by themselves."""
        while True:
            self._cluster.note_ready(self._busy)
            for process in self._cluster.dead():
                name = process.spec.name
                if name not in self._busy:
                    self._on_own_end(name, process.exit_code or 0)
                    await asyncio.sleep(_RESTART_S)
                    self._cluster.restart(name)
            await asyncio.sleep(_WATCH_S)

    def _on_own_end(self, name: str, status: int) -> None:
        now_s = self._cluster.now_s()
        self._cluster.down[name].begin(now_s)
        self._ledger.own_ends[f"{name}, status {status}"] += 1
        self._say(f"{now_s:7.1f} s  {name} ended by itself with status {status}")
        if status < 0:
            self._ledger.violations.append(f"{name} was ended by signal {-status}")

    async def _apply(self, fault: Fault, began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + fault.at_s - self._cluster.now_s()))
        if fault.target in self._busy:
            return  # its last fault took longer than planned
        self._busy.add(fault.target)
        self._ledger.faults[fault.kind] += 1
        self._say(str(fault))
        try:
            await self._kinds[fault.kind](fault.target, fault.lasts_s)
        finally:
            self._busy.discard(fault.target)

    async def _kill(self, name: str, lasts_s: float) -> None:
        process = self._cluster.processes[name]
        self._cluster.down[name].begin(self._cluster.now_s())
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, _ENDS_WITHIN_S)
        await asyncio.sleep(lasts_s)
        self._cluster.restart(name)

    async def _restart(self, name: str, _lasts_s: float) -> None:
        process = self._cluster.processes[name]
        self._cluster.down[name].begin(self._cluster.now_s())
        process.signal(signal.SIGTERM)
        if not await asyncio.to_thread(process.wait, _ENDS_WITHIN_S):
            self._ledger.violations.append(f"{name} runs {_ENDS_WITHIN_S:.0f} s after SIGTERM")
            process.signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, _ENDS_WITHIN_S)
        self._cluster.restart(name)

    async def _pause(self, name: str, lasts_s: float) -> None:
        process = self._cluster.processes[name]
        process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            process.signal(signal.SIGCONT)

    async def _stall_redis(self, name: str, lasts_s: float) -> None:
        valve = self._cluster.valves[name]
        valve.shut()
        try:
            await asyncio.sleep(lasts_s)
        finally:
            valve.open()

    async def _cut_redis(self, name: str, _lasts_s: float) -> None:
        self._cluster.valves[name].cut()

    async def _kill_redis(self, _name: str, lasts_s: float) -> None:
        await self._down_redis(lasts_s, empties=False)

    async def _empty_redis(self, _name: str, lasts_s: float) -> None:
        await self._down_redis(lasts_s, empties=True)

    async def _down_redis(self, lasts_s: float, *, empties: bool) -> None:
        redis = self._cluster.redis
        await asyncio.to_thread(redis.kill)
        if empties:
            redis.empty()
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(redis.start)

    async def _pause_redis(self, _name: str, lasts_s: float) -> None:
        self._cluster.redis.pause()
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._cluster.redis.resume()
