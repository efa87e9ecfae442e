"""Run the processes of a chaos run: services, a Redis, and relays before each of them.

Two conductors share the Redis. `DownTimes` says when a process was down or starting.
"""

import os
import secrets
import time
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos.leaks import held_by_conductor, held_by_worker
from benchmarks.chaos.redis_process import RedisProcess
from benchmarks.chaos.service_relays import Link, ServiceRelays
from benchmarks.chaos.small_disk import MountRefused, SmallDisk
from halfmoon_cli.up.embedded_cluster import (
    ClusterPlan,
    EmbeddedCluster,
    ProcessSpec,
    ServiceProcess,
    plan_processes,
)
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_testing.transfer_soak import TcpValve

MODEL_NAME = "chaos"
CONDUCTORS = ("conductor-0", "conductor-1")
WORKERS = tuple(f"{role}-{i}" for role in ("kvstore", "prefill", "decode") for i in range(2))
SERVICES = (*CONDUCTORS, *WORKERS)
KVSTORES = tuple(name for name in WORKERS if name.startswith("kvstore"))
#: Services that are killed at once, one of each role.
RACKS = tuple(f"decode-{i} prefill-{i} kvstore-{i}" for i in range(2))
#: Links that faults may befall: all connections of a service, or those between two.
LINKS = {
    **{f"{name}/all": Link(name) for name in SERVICES},
    **{
        f"{one}/{other}": Link(one, other)
        for i, one in enumerate(SERVICES)
        for other in SERVICES[i + 1 :]
        if other not in CONDUCTORS
    },
}
#: Links with transfers: conductors have none.
TRANSFER_LINKS = tuple(name for name in LINKS if not name.startswith(CONDUCTORS))
_DISK_MIB = 4
_KEY_VARIABLE = "HALFMOON_CLUSTER_KEY"
#: Numbers that the second and the third part of a loopback address take.
_N_SECOND, _N_THIRD = 250, 250
_ENGINE = (
    "--dtype=float32",
    "--block-size=16",
    "--no-measure",
    "--pool-mib=8",
)
_METADATA = "redis://replaced"


@dataclass
class DownTimes:
    """Intervals in which a process was down, from its fault to its being ready again."""

    ended: list[tuple[float, float]] = field(default_factory=list)
    #: Beginning of the present one; None while the process is up.
    since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Note that the process goes down; nothing happens if it is down."""
        if self.since_s is None:
            self.since_s = now_s

    def end(self, now_s: float) -> None:
        """Note that the process is ready; nothing happens if it is up."""
        if self.since_s is not None:
            self.ended.append((self.since_s, now_s))
            self.since_s = None

    def meet(self, begin_s: float, end_s: float) -> bool:
        """Return whether the process was down at any moment of an interval."""
        if self.since_s is not None and self.since_s <= end_s:
            return True
        return any(first <= end_s and last >= begin_s for first, last in self.ended)


def plan_hosts(number: int) -> dict[str, tuple[str, str]]:
    """Return for each service the address at which it listens, and the one that it advertises.

    Args:
        number: of the run; two at the same time have different ones, such as their process ids.
    """
    rest, second = divmod(number, _N_SECOND)
    third = 2 * (rest % (_N_THIRD // 2))
    listens, relay = (f"127.{1 + second}.{third + i}" for i in (1, 2))
    return {name: (f"{listens}.{i}", f"{relay}.{i}") for i, name in enumerate(SERVICES, 1)}


def plan_chaos(
    plan: ClusterPlan,
    disks: Path,
    redis_urls: Mapping[str, str],
    hosts: Mapping[str, tuple[str, str]],
) -> list[ProcessSpec]:
    """Plan the processes: those of `plan`, and a second conductor on a port of its own.

    Services with the same number count as one machine: they share memory, others use TCP.
    """
    alone = replace(plan, http_port=free_port(), n_prefill=0, n_decode=0, n_kvstore=0)
    (second,) = plan_processes(alone)
    arguments = [CONDUCTORS[1] if each == CONDUCTORS[0] else each for each in second.arguments]
    second = replace(second, name=CONDUCTORS[1], arguments=tuple(arguments))
    specs = []
    for spec in (*plan_processes(plan), second):
        url = redis_urls[spec.name]
        host, relay = hosts[spec.name]
        replaced = {_METADATA: url, plan.host: host}
        arguments = [replaced.get(each, each) for each in spec.arguments]
        machine = spec.name.rpartition("-")[2]
        arguments += [f"--advertise-host={relay}", f"--host-id=chaos-{machine}"]
        if spec.role == "kvstore":
            arguments.append(f"--disk-path={disks / spec.name}")
        specs.append(replace(spec, arguments=tuple(arguments)))
    return specs


class ChaosCluster(EmbeddedCluster):
    """A cluster whose processes are killed, paused and started again."""

    def __init__(
        self, model: Path, folder: Path, transfer_backends: str, *, has_key: bool, seed: int
    ) -> None:
        common = (f"--transfer-backends={transfer_backends}",)
        kvstore = ("--capacity-mib=1", f"--disk-mib={_DISK_MIB}", *common)
        worker = (*_ENGINE, *common)
        plan = ClusterPlan(
            model=str(model),
            http_port=free_port(),
            n_prefill=2,
            n_decode=2,
            n_kvstore=2,
            served_model_name=MODEL_NAME,
            metadata=_METADATA,
            threads={"prefill": 1, "decode": 1},
            extra={"prefill": worker, "decode": worker, "kvstore": kvstore},
        )
        super().__init__(plan, folder)
        self.redis = RedisProcess(folder / "redis")
        self.valves: dict[str, TcpValve] = {}
        self.hosts = plan_hosts(os.getpid())
        self.relays = ServiceRelays(self.hosts, self._pids, seed)
        self.disks = {name: SmallDisk(folder / "disks" / name, _DISK_MIB + 1) for name in KVSTORES}
        #: Reason why disks can't be filled; empty: they can.
        self.no_small_disks = ""
        self.down = {name: DownTimes() for name in SERVICES}
        key = secrets.token_hex(32) if has_key else ""
        # Services read the key from the environment alone; without one it must not have any.
        os.environ[_KEY_VARIABLE] = key
        self._headers = {"authorization": f"Bearer {operator_token(key)}"} if key else {}
        self._stack = ExitStack()
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self._began_s

    def start(self) -> None:
        """Start Redis and all services; see `ready`."""
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        self.redis.start()
        for name in SERVICES:
            self.valves[name] = valve = self._stack.enter_context(TcpValve("127.0.0.1"))
            valve.target = ("127.0.0.1", self.redis.port)
        self._mount_disks()
        self._stack.enter_context(self.relays)
        urls = {name: f"redis://{valve.address}/0" for name, valve in self.valves.items()}
        for spec in plan_chaos(self.plan, self.folder / "disks", urls, self.hosts):
            self.down[spec.name].begin(self.now_s())
            self.processes[spec.name] = ServiceProcess(spec, self.folder)

    def __enter__(self) -> "ChaosCluster":
        self.start()
        return self

    def stop(self, grace_s: float = 15.0) -> None:
        """Stop all processes, and Redis after them."""
        super().stop(grace_s)
        self.redis.kill()
        self._stack.close()

    def url_of(self, conductor: str) -> str:
        """Return the URL of a conductor's REST API."""
        arguments = self.processes[conductor].spec.arguments
        return f"http://{self.hosts[conductor][0]}:{arguments[arguments.index('--http-port') + 1]}"

    def note_ready(self, under_fault: Set[str]) -> None:
        """Note for each process that was down whether it is ready, but for those under a fault."""
        for name, process in self.processes.items():
            if name in under_fault:
                continue
            if process.stage == "ready" and process.exit_code is None:
                self.down[name].end(self.now_s())

    def all_is_used(self) -> bool:
        """Return whether each conductor is ready and uses all workers."""
        return all(self._workers_used_by(name) == set(WORKERS) for name in CONDUCTORS)

    def held(self) -> list[str]:
        """Describe what services hold for requests, and those that do not answer."""
        held = []
        for name in self.processes:
            try:
                if name in CONDUCTORS:
                    held += held_by_conductor(name, self._debug(name))
                else:
                    held += held_by_worker(name, self.metrics(name))
            except (httpx.HTTPError, KeyError, ValueError) as error:
                held.append(f"{name} does not say what it holds: {error!r}")
        return held

    def metrics(self, worker: str) -> str:
        """Return the metrics of a worker, as it serves them.

        Raises:
            httpx.HTTPError: it does not.
            KeyError: it has not started yet.
        """
        url = f"{self.processes[worker].status['operators']}/metrics"
        answer = httpx.get(url, timeout=5, headers=self._headers)
        answer.raise_for_status()
        return answer.text

    def _pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in tuple(self.processes.items())}

    def _mount_disks(self) -> None:
        try:
            for disk in self.disks.values():
                disk.mount()
                self._stack.callback(disk.unmount)
        except MountRefused as error:
            self.no_small_disks = str(error)

    def _debug(self, conductor: str) -> dict[str, Any]:
        url = f"{self.url_of(conductor)}/debug/cluster"
        answer = httpx.get(url, timeout=5, headers=self._headers)
        answer.raise_for_status()
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def _workers_used_by(self, conductor: str) -> set[str]:
        try:
            workers = self._debug(conductor)["workers"]
        except (httpx.HTTPError, ValueError):
            return set()
        return {w["worker_id"] for w in workers if not w["refused"] and not w["draining"]}
