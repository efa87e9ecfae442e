"""Run one seed: start a cluster, send it requests, disturb it, let it calm down, look at it."""

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from halfmoon_metadata.store_interface import MetadataError
from halfmoon_testing.sim_cluster.sim_clients import ClientRequest
from halfmoon_testing.sim_cluster.sim_cluster import SimCluster
from halfmoon_testing.sim_cluster.sim_faults import SimFaults
from halfmoon_testing.sim_cluster.sim_invariants import (
    check_end,
    check_nothing_lost,
    check_recovery,
    check_requests,
)
from halfmoon_testing.sim_cluster.violation import Violation
from halfmoon_testing.sim_cluster.virtual_loop import LiveLock
from halfmoon_workers.decode.decode_worker import DecodeWorker

#: Seconds in which a cluster starts.
_START_S = 20.0
#: Seconds within which a request ends after the last fault.
REQUEST_S = 90.0


@dataclass
class SimResult:
    """Say what came of one seed."""

    seed: int
    violation: Violation | None = None
    #: How requests ended.
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    n_messages: int = 0
    n_callbacks: int = 0
    #: Seconds from the last fault to the first request that succeeded.
    recovery_s: float = 0.0
    log: list[str] = field(default_factory=list)


class SimRun:
    """One cluster from its start to its end."""

    def __init__(self, cluster: SimCluster, faults: SimFaults | None) -> None:
        """Run nothing yet."""
        self.cluster = cluster
        self.faults = faults
        #: When the last fault was over, and when the next request had succeeded.
        self.last_fault_s = 0.0
        self.recovered_s = 0.0

    async def run(self) -> None:
        """Run everything.

        Raises:
            Violation: an invariant does not hold.
        """
        for name in self.cluster.names:
            self.cluster.start(name)
        await self.cluster.until(self.cluster.is_whole, _START_S, "all services are in use")
        tasks = [
            self.cluster.loop.start(self.cluster.clients.process, self._send(each))
            for each in self.cluster.planned
        ]
        if self.cluster.shape.n_puts:
            tasks.append(
                self.cluster.loop.start(
                    self.cluster.puts.process, self.cluster.puts.run(self.cluster.shape.n_puts)
                )
            )
        if self.faults is not None:
            await self.faults.run()
        self.last_fault_s = self.cluster.loop.time()
        pages_rest = any(self._resting_pages())
        self.cluster.log("run", "no faults from here on")
        recovery = self.cluster.loop.start(self.cluster.clients.process, self._probe())
        await self.cluster.until(
            lambda: all(task.done() for task in tasks), REQUEST_S, "every request ends", self._open
        )
        await self.cluster.until(
            recovery.done, REQUEST_S, "a request succeeds after the last fault"
        )
        for task in [*tasks, recovery]:
            task.result()
        check_requests(self.cluster)
        check_nothing_lost(self.cluster, {} if self.faults is None else self.faults.counts)
        lost_records = self.faults is not None and bool(self.faults.counts["metadata loss"])
        check_recovery(
            self.recovered_s - self.last_fault_s, lost_records=lost_records, pages_rest=pages_rest
        )
        await check_end(self.cluster)
        if self.cluster.shape.n_puts:
            await self.cluster.loop.start(self.cluster.puts.process, self.cluster.puts.check())

    def _resting_pages(self) -> Iterator[int]:
        """Yield the pages in quarantine of each decode worker that lives."""
        for service in self.cluster.services.values():
            if isinstance(service.worker, DecodeWorker):
                yield service.worker.batch.pages_quarantined

    def _open(self) -> str:
        return ", ".join(r.request_id for r in self.cluster.clients.requests if not r.end)

    async def _send(self, request: ClientRequest) -> None:
        await asyncio.sleep(request.at_s)
        await self.cluster.clients.send(request, self.cluster.conductor)

    async def _probe(self) -> None:
        """Send small requests until one succeeds."""
        number = 1000
        while True:
            probe = ClientRequest(
                number,
                (number % 997, 1, 2),
                2,
                "probe",
                self.cluster.planned[0].sampling,
                self.cluster.loop.time(),
            )
            await self.cluster.clients.send(probe, self.cluster.conductor)
            if probe.end == "ok":
                self.recovered_s = self.cluster.loop.time()
                return
            number += 1
            await asyncio.sleep(0.05)


def run_seed(seed: int, *, with_log: bool = False, with_faults: bool = True) -> SimResult:
    """Run one seed, and return what came of it."""
    cluster = SimCluster(seed, with_log=with_log)
    faults = SimFaults(cluster, random.Random(f"{seed}/faults")) if with_faults else None
    run = SimRun(cluster, faults)
    result = SimResult(seed)
    _configure_log(cluster)
    gc_was_on = gc.isenabled()
    gc.disable()
    asyncio.set_event_loop(cluster.loop)
    try:
        cluster.loop.run_until_complete(run.run())
        if cluster.loop.errors:
            raise Violation("nothing is raised into the loop", cluster.loop.errors[0])
    except Violation as violation:
        result.violation = violation
    except LiveLock as error:
        result.violation = Violation("no live lock", str(error))
    finally:
        _end(cluster)
        if gc_was_on:
            gc.enable()
        asyncio.set_event_loop(None)
        structlog.reset_defaults()
    result.ends = Counter(request.end for request in cluster.clients.requests)
    if faults is not None:
        result.faults = faults.counts
    result.recovery_s = run.recovered_s - run.last_fault_s
    result.virtual_s = cluster.loop.time()
    result.n_messages = cluster.network.n_delivered
    result.n_callbacks = cluster.loop.n_callbacks
    result.log = cluster.log_lines
    return result


def _close(coro: Any) -> None:
    """End a coroutine that never goes on; its `finally` blocks may wait several times."""
    for _ in range(20):
        try:
            coro.close()
        except BaseException:  # it may be a group with `GeneratorExit` in it
            continue
        return


def _configure_log(cluster: SimCluster) -> None:
    """Send what services log into the log of the run, or nowhere."""

    def write(logger: object, name: str, event: "structlog.typing.EventDict") -> str:
        if cluster.with_log:
            fields = " ".join(f"{key}={value!r}" for key, value in event.items() if key != "event")
            cluster.log("log", f"{name} {event['event']} {fields}")
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, write])


def _end(cluster: SimCluster) -> None:
    """Drop what is left: the tasks of all processes, without running them."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        processes = [
            *(each.process for each in cluster.starts),
            cluster.clients.process,
            cluster.puts.process,
            cluster.loop.outside,
        ]
        for process in processes:
            cluster.loop.kill(process)
        for process in processes:
            for task in list(process.tasks):
                _close(task.get_coro())
            process.tasks.clear()
            for thread in process.threads:
                # What it stands in holds regions, and no collection finds them there.
                with suppress(BaseException):
                    thread.throw()
            process.threads.clear()
        for service in [*cluster.starts, cluster.puts]:
            for engine in (service.engine, service.stage_engine):
                if engine is not None:
                    engine.detach()
            if service.transfer is not None:
                with suppress(MetadataError):
                    service.transfer.close()
            service.pool.close()
        cluster.loop.close()
    finally:
        sys.unraisablehook = hook
