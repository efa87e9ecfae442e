"""Apply a plan of faults to a cluster, and start again whatever ended."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import httpx

from benchmarks.chaos.chaos_cluster import LINKS, ChaosCluster
from benchmarks.chaos.fault_plan import Fault
from benchmarks.chaos.leaks import sum_of
from benchmarks.chaos.ledger import ChaosLedger
from benchmarks.chaos.service_relays import LinkCondition

#: Seconds that a process may take to end after SIGTERM: its drain, and some.
_ENDS_WITHIN_S = 45.0
_WATCH_S = 0.2
#: Seconds after which a process that ended without a fault is started again.
_RESTART_S = 1.0
#: Seconds that a kvstore may take to start.
_READY_WITHIN_S = 60.0
#: Jitter of a slow link, as a share of its delay.
_JITTER = 0.5


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
        self._ended = asyncio.Event()
        self._kinds: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "restart": self._restart,
            "redis stalled": self._stall_redis,
            "redis cut": self._cut_redis,
            "redis killed": self._kill_redis,
            "redis emptied": self._empty_redis,
            "redis paused": self._pause_redis,
            "redis full": self._fill_redis,
            "rack killed": self._kill,
            "link slow": self._worsen_link,
            "link narrow": self._worsen_link,
            "link stalled": self._worsen_link,
            "link cut": self._cut_link,
            "link damaged": self._damage_link,
            "disk full": self._fill_disk,
            "disk full at start": self._fill_disk_at_start,
        }

    def end_early(self) -> None:
        """Begin no further fault; those under way go on to their end."""
        self._ended.set()

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
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, began_s + fault.at_s - self._cluster.now_s())):
                await self._ended.wait()
        if self._ended.is_set() or not self._busy.isdisjoint(fault.members):
            return  # no more faults are wanted, or the target's last one took longer than planned
        self._busy.update(fault.members)
        self._ledger.faults[fault.kind] += 1
        self._say(str(fault))
        try:
            await self._kinds[fault.kind](fault)
        finally:
            self._busy.difference_update(fault.members)

    async def _kill(self, fault: Fault) -> None:
        await asyncio.gather(*map(self._end, fault.members))
        await asyncio.sleep(fault.lasts_s)
        for name in fault.members:
            self._cluster.restart(name)

    async def _end(self, name: str) -> None:
        process = self._cluster.processes[name]
        self._cluster.down[name].begin(self._cluster.now_s())
        process.signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, _ENDS_WITHIN_S)

    async def _restart(self, fault: Fault) -> None:
        await self._restart_now(fault.target)

    async def _restart_now(self, name: str) -> None:
        process = self._cluster.processes[name]
        self._cluster.down[name].begin(self._cluster.now_s())
        process.signal(signal.SIGTERM)
        if not await asyncio.to_thread(process.wait, _ENDS_WITHIN_S):
            self._ledger.violations.append(f"{name} runs {_ENDS_WITHIN_S:.0f} s after SIGTERM")
            process.signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, _ENDS_WITHIN_S)
        self._cluster.restart(name)

    async def _pause(self, fault: Fault) -> None:
        process = self._cluster.processes[fault.target]
        process.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            process.signal(signal.SIGCONT)

    async def _stall_redis(self, fault: Fault) -> None:
        valve = self._cluster.valves[fault.target]
        valve.shut()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            valve.open()

    async def _cut_redis(self, fault: Fault) -> None:
        self._cluster.valves[fault.target].cut()

    async def _kill_redis(self, fault: Fault) -> None:
        await self._down_redis(fault.lasts_s, empties=False)

    async def _empty_redis(self, fault: Fault) -> None:
        await self._down_redis(fault.lasts_s, empties=True)

    async def _down_redis(self, lasts_s: float, *, empties: bool) -> None:
        redis = self._cluster.redis
        await asyncio.to_thread(redis.kill)
        if empties:
            redis.empty()
        await asyncio.sleep(lasts_s)
        await asyncio.to_thread(redis.start)

    async def _pause_redis(self, fault: Fault) -> None:
        self._cluster.redis.pause()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._cluster.redis.resume()

    async def _fill_redis(self, fault: Fault) -> None:
        redis = self._cluster.redis
        await asyncio.to_thread(redis.limit_memory, True)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            await asyncio.to_thread(redis.limit_memory, False)

    # -- connections between services --------------------------------------------------------

    async def _worsen_link(self, fault: Fault) -> None:
        relays, link = self._cluster.relays, LINKS[fault.target]
        await asyncio.to_thread(relays.set, link, condition_of(fault))
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            await asyncio.to_thread(relays.set, link, None)

    async def _cut_link(self, fault: Fault) -> None:
        await asyncio.to_thread(self._cluster.relays.cut, LINKS[fault.target])

    async def _damage_link(self, fault: Fault) -> None:
        relays, link = self._cluster.relays, LINKS[fault.target]
        await asyncio.to_thread(relays.damage, link, damages=True)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            await asyncio.to_thread(relays.damage, link, damages=False)

    # -- disks -------------------------------------------------------------------------------

    async def _fill_disk(self, fault: Fault) -> None:
        """Fill a disk that is in use; the process stands still while its files lose their room."""
        name, disk = fault.target, self._cluster.disks[fault.target]
        process = self._cluster.processes[name]
        process.signal(signal.SIGSTOP)
        try:
            n_slots = await asyncio.to_thread(disk.fill, random.Random(str(fault)))
        finally:
            process.signal(signal.SIGCONT)
        self._ledger.effects["disk slots without room"] += n_slots
        before = await self._disk_failures(name)
        try:
            await asyncio.sleep(fault.lasts_s)
            n_failures = await self._disk_failures(name) - before
            self._ledger.effects["disk writes that failed"] += max(0, n_failures)
        finally:
            disk.free()

    async def _fill_disk_at_start(self, fault: Fault) -> None:
        """Start a kvstore with no file of its own on a full disk, and again when there is room."""
        name, disk = fault.target, self._cluster.disks[fault.target]
        await self._end(name)
        disk.empty()
        await asyncio.to_thread(disk.fill_rest)
        try:
            self._cluster.restart(name)
            await self._wait_until_ready(name)
            await asyncio.sleep(fault.lasts_s)
            if (status := self._cluster.processes[name].exit_code) is not None:
                self._ledger.violations.append(f"{name} ended with {status} on a full disk")
            self._ledger.effects["starts without a disk"] += 1
        finally:
            disk.free()
        await self._restart_now(name)

    async def _wait_until_ready(self, name: str) -> None:
        """Wait until a process is ready or its time is over."""
        for _ in range(round(_READY_WITHIN_S / _WATCH_S)):
            if self._cluster.processes[name].stage == "ready":
                return
            await asyncio.sleep(_WATCH_S)

    async def _disk_failures(self, name: str) -> int:
        """Return how many writes to its disk have failed; 0 if it does not say."""
        try:
            metrics = await asyncio.to_thread(self._cluster.metrics, name)
        except (httpx.HTTPError, KeyError):
            return 0
        return round(sum_of("halfmoon_kvstore_disk_write_failures", metrics))


def condition_of(fault: Fault) -> LinkCondition:
    """Return what a fault of a link does to its bytes."""
    match fault.kind:
        case "link slow":
            spread_s = fault.amount * _JITTER
            return LinkCondition(delay_s=(fault.amount - spread_s, fault.amount + spread_s))
        case "link narrow":
            return LinkCondition(bytes_per_s=fault.amount)
        case "link stalled":
            return LinkCondition(holds=True)
        case _:
            raise ValueError(f"{fault.kind} is no lasting condition of a link")
