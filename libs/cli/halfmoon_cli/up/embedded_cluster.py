"""Run an embedded cluster: Halfmoon's services as processes of this machine.

`plan_processes`, a pure function, plans the processes; `EmbeddedCluster` starts, watches and stops
them. Each process writes its log and its progress into files of its own. So its progress can be
shown, and its last log lines when it dies.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfmoon_metadata.cluster_namespace import DEFAULT_CLUSTER
from halfmoon_metadata.tcp_ports import free_port, is_free
from halfmoon_runtime.own_address import resolve_own_address

#: Order in which services are started, and also stopped: the conductor lets its requests finish
#: while the others still serve them.
START_ORDER = ("conductor", "kvstore", "prefill", "decode")


@dataclass(frozen=True)
class ClusterPlan:
    """Numbers of workers, their model, and their addresses."""

    model: str
    http_port: int
    n_prefill: int = 1
    #: Prefill workers of a group that compute long prompts together; 0: there are no groups.
    group_size: int = 0
    n_decode: int = 1
    n_kvstore: int = 1
    host: str = "127.0.0.1"
    served_model_name: str = ""
    engine: str = "torch"
    #: Interpreter of prefill and decode workers; empty: of this process. Some engines live in
    #: environments of their own.
    worker_python: str = ""
    #: Metadata server; empty: the conductor's own.
    metadata: str = ""
    #: Name of the cluster, whose records the metadata server keeps apart from others'.
    cluster: str = DEFAULT_CLUSTER
    #: Port of the conductor's own.
    metadata_port: int = field(default_factory=free_port)
    #: Threads of each worker of a role; without one its own setting decides.
    threads: Mapping[str, int] = field(default_factory=dict)
    #: MiB of each worker for weights and KV pages; 0: its own setting decides.
    memory_mib: int = 0
    #: Part of a GPU of each worker; 0: its own setting decides.
    device_share: float = 0.0
    #: Further flags for all services of a role, such as {"prefill": ["--chunk-tokens=64"]}.
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Limits of the conductor by flag, such as {"max-queue-s": "60"}.
    limits: Mapping[str, str] = field(default_factory=dict)
    #: Flags of the process that bridges plain servers; empty: workers of our own serve.
    bridge: tuple[str, ...] = ()
    #: Files of the certificate and key that all services serve HTTP with; empty: in the clear.
    tls_cert: str = ""
    tls_key: str = ""
    #: File of CAs that all processes trust besides the system's; empty: only those.
    tls_ca: str = ""
    #: Variables of all processes, over those of this process's environment.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_tls(self) -> bool:
        """Return whether the REST API speaks TLS."""
        return bool(self.tls_cert or self._of_conductor("tls-cert"))

    @property
    def url(self) -> str:
        """URL of the REST API."""
        host = reachable_host(resolve_own_address(self._of_conductor("host") or self.host))
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.http_port}"

    @property
    def metadata_url(self) -> str:
        """URL of the metadata server."""
        if self.metadata:
            return self.metadata
        base = self.url.rpartition(":")[0]
        if chosen := self._of_conductor("metadata-host"):
            host = reachable_host(resolve_own_address(chosen))
            base = f"{base.partition('://')[0]}://{f'[{host}]' if ':' in host else host}"
        return f"{base}:{self._of_conductor('metadata-port') or self.metadata_port}/metadata"

    @property
    def drain_s(self) -> float:
        """Seconds in which the conductor finishes its requests; its own setting, or 30."""
        stated = self._of_conductor("drain-s") or os.environ.get("HALFMOON_DRAIN_S", "")
        with suppress(ValueError):
            return float(stated)
        return 30.0

    def _of_conductor(self, name: str) -> str:
        """Return the value of a flag that is set for the conductor; empty: it is not."""
        start = f"--{name}="
        given = [f for f in self.extra.get("conductor", ()) if f.startswith(start)]
        return given[-1].removeprefix(start) if given else ""


def reachable_host(host: str) -> str:
    """Return the address that reaches a listener of this machine from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def metadata_port_beside(http_port: int) -> int:
    """Return the port below the REST API's where it is free, else another free one."""
    return http_port - 1 if http_port > 1 and is_free(http_port - 1) else free_port()


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start."""

    name: str
    role: str
    arguments: tuple[str, ...]
    #: Interpreter; empty: of this process.
    python: str = ""


def plan_processes(plan: ClusterPlan) -> list[ProcessSpec]:
    """Plan the processes of a cluster, in starting order."""
    metadata = plan.metadata_url
    engine = ["--engine", plan.engine]
    model = ["--model", plan.model, "--served-model-name", plan.served_model_name]
    specs: list[ProcessSpec] = []
    files = {"cert": plan.tls_cert, "key": plan.tls_key, "ca": plan.tls_ca}
    tls = [f"--tls-{name}={path}" for name, path in files.items() if path]

    def add(role: str, index: int, *arguments: str) -> None:
        name = f"{role}-{index}"
        common = ("--worker-id", name, "--host", plan.host, *tls, *plan.extra.get(role, ()))
        python = plan.worker_python if role in ("prefill", "decode") else ""
        specs.append(ProcessSpec(name, role, (*arguments, *common), python))

    own = ["--metadata", plan.metadata or "embedded"]
    if not plan.metadata:
        own += ["--metadata-port", str(plan.metadata_port)]
    limits = [f"--{flag}={value}" for flag, value in plan.limits.items()]
    add("conductor", 0, *own, "--http-port", str(plan.http_port), *model, *limits)
    if plan.bridge:
        add("servers", 0, "--metadata", metadata, *plan.bridge)
        return specs
    for i in range(plan.n_kvstore):
        add("kvstore", i, "--metadata", metadata)

    def shares(role: str) -> list[str]:
        """Return the flags by which a worker takes its share of the machine."""
        wanted = {
            "--threads": plan.threads.get(role, 0),
            "--memory-mib": plan.memory_mib,
            "--device-share": plan.device_share,
        }
        chosen = {flag.partition("=")[0] for flag in plan.extra.get(role, ())}
        flags = {flag: value for flag, value in wanted.items() if value and flag not in chosen}
        return [part for flag, value in flags.items() for part in (flag, str(value))]

    for i in range(plan.n_prefill):
        home = ["--home-kvstore", f"kvstore-{i % plan.n_kvstore}"] if plan.n_kvstore else []
        stage = _stage_flags(i, plan.group_size)
        flags = [*home, *stage, *shares("prefill")]
        add("prefill", i, "--metadata", metadata, *model, *engine, *flags)
    for i in range(plan.n_decode):
        add("decode", i, "--metadata", metadata, *model, *engine, *shares("decode"))
    return specs


def _stage_flags(index: int, group_size: int) -> list[str]:
    """Return the flags by which a prefill worker is a stage of its group."""
    if not group_size:
        return []
    group, stage = divmod(index, group_size)
    return ["--group", f"group-{group}", "--stage", f"{stage}/{group_size}"]


class ServiceProcess:
    """A service process that was started; it ends with this process, however that ends."""

    def __init__(
        self, spec: ProcessSpec, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._status_path = folder / f"{spec.name}.status.json"
        self._status_path.unlink(missing_ok=True)
        variables = {
            **os.environ,
            **(environment or {}),
            "HALFMOON_STATUS_FILE": str(self._status_path),
            "PYTHONUNBUFFERED": "1",
        }
        # Here: it imports asyncio, which no help needs.
        from halfmoon_sandbox.bound_process import start_bound

        self.log_path.touch(0o600)
        with self.log_path.open("ab") as log:
            self._process = start_bound(
                [spec.python or sys.executable, "-m", f"halfmoon_{spec.role}", *spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # Ctrl-C is ours to pass on, in order
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit status; None while the process runs, negative after a signal."""
        return self._process.poll()

    @property
    def stage(self) -> str:
        """The stage that the process reports; "ready" once it has started."""
        return str(self.status.get("stage", "starting"))

    @property
    def status(self) -> dict[str, Any]:
        """The latest progress record; empty before the first."""
        try:
            record = json.loads(self._status_path.read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def refusal(self) -> str | None:
        """The reason why the process refused to start; None if it did not."""
        record = self.status
        return str(record.get("error")) if record.get("refused") else None

    @property
    def misspelt(self) -> dict[str, str]:
        """Variables that the process takes for misspelt settings, each with the one it meant."""
        found = self.status.get("misspelt")
        return found if isinstance(found, dict) else {}

    def last_lines(self, n: int = 12) -> list[str]:
        """Return the last lines of the log."""
        try:
            with self.log_path.open(errors="replace") as log:
                return [line.rstrip("\n") for line in deque(log, n)]
        except OSError:
            return []

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens once the process has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class EmbeddedCluster:
    """The processes of one plan; as a context manager it stops them."""

    def __init__(self, plan: ClusterPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.processes: dict[str, ServiceProcess] = {}

    def __enter__(self) -> "EmbeddedCluster":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes, and return at once; see `ready`."""
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        for spec in plan_processes(self.plan):
            (self.folder / f"{spec.name}.log").unlink(missing_ok=True)
            self.processes[spec.name] = self._open(spec)

    def restart(self, name: str) -> None:
        """Restart a process that has ended."""
        self.processes[name] = self._open(self.processes[name].spec)

    def ready(self) -> bool:
        """Return whether all processes report that they are ready."""
        return all(process.stage == "ready" for process in self.processes.values())

    def dead(self) -> list[ServiceProcess]:
        """Return the processes that have ended."""
        return [p for p in self.processes.values() if p.exit_code is not None]

    def stop(self, grace_s: float = 15.0) -> None:
        """Stop all processes, each role before the next; kill those that do not end in time."""
        for role in (*START_ORDER, "servers"):
            members = [p for p in self.processes.values() if p.spec.role == role]
            for process in members:
                process.signal(signal.SIGTERM)
            deadline_s = time.monotonic() + grace_s
            for process in members:
                if not process.wait(max(0.0, deadline_s - time.monotonic())):
                    process.signal(signal.SIGKILL)
                    process.wait(grace_s)

    def _open(self, spec: ProcessSpec) -> ServiceProcess:
        # A variable, no flag: in a rolling upgrade, services of the build before know no such flag.
        named = {"HALFMOON_CLUSTER": self.plan.cluster}
        return ServiceProcess(spec, self.folder, {**named, **self.plan.environment})
