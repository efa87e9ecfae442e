"""An embedded cluster: Halfmoon's services as processes of this machine.

What to start is planned by a plain function; `EmbeddedCluster` starts, watches and stops it. Each
process writes its log to a file of its own and its progress to another, so that whoever
watches can say how far it is and, when it dies, what it said last.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfmoon_runtime.own_address import resolve_own_address

#: Services in the order in which they are started and then stopped: the conductor lets its
#: requests finish while the others still serve them.
START_ORDER = ("conductor", "kvstore", "prefill", "decode")


@dataclass(frozen=True)
class ClusterPlan:
    """How many of which, of what model, and where."""

    model: str
    http_port: int
    n_prefill: int = 1
    n_decode: int = 1
    n_kvstore: int = 1
    host: str = "127.0.0.1"
    served_model_name: str = ""
    #: Metadata server; empty: the conductor's own.
    metadata: str = ""
    #: Further flags for all services of a role, such as {"prefill": ["--chunk-tokens=64"]}.
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the REST API will be."""
        host = self.host
        for flag in self.extra.get("conductor", ()):
            if flag.startswith("--host="):
                host = reachable_host(resolve_own_address(flag.removeprefix("--host=")))
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http_port}"


def reachable_host(host: str) -> str:
    """Where a process of this machine reaches one that listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start."""

    name: str
    role: str
    arguments: tuple[str, ...]


def plan_processes(plan: ClusterPlan) -> list[ProcessSpec]:
    """The processes of a cluster, in starting order."""
    metadata = plan.metadata or f"{plan.url}/metadata"
    model = ["--model", plan.model, "--served-model-name", plan.served_model_name]
    specs: list[ProcessSpec] = []

    def add(role: str, index: int, *arguments: str) -> None:
        name = f"{role}-{index}"
        common = ("--worker-id", name, "--host", plan.host, *plan.extra.get(role, ()))
        specs.append(ProcessSpec(name, role, (*arguments, *common)))

    own = plan.metadata or "embedded"
    add("conductor", 0, "--metadata", own, "--http-port", str(plan.http_port), *model)
    for i in range(plan.n_kvstore):
        add("kvstore", i, "--metadata", metadata)
    for i in range(plan.n_prefill):
        home = ["--home-kvstore", f"kvstore-{i % plan.n_kvstore}"] if plan.n_kvstore else []
        add("prefill", i, "--metadata", metadata, *model, *home)
    for i in range(plan.n_decode):
        add("decode", i, "--metadata", metadata, *model)
    return specs


class ServiceProcess:
    """One started service."""

    def __init__(self, spec: ProcessSpec, folder: Path) -> None:
        self.spec = spec
        self.log_path = folder / f"{spec.name}.log"
        self._status_path = folder / f"{spec.name}.status.json"
        self._status_path.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "HALFMOON_STATUS_FILE": str(self._status_path),
            "PYTHONUNBUFFERED": "1",
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"halfmoon_{spec.role}", *spec.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to pass on, in order
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.poll()

    @property
    def stage(self) -> str:
        """How far it is, in its own word; "ready" at the end of starting."""
        return str(self.status.get("stage", "starting"))

    @property
    def status(self) -> dict[str, Any]:
        """Its latest progress record; empty before the first."""
        try:
            record = json.loads(self._status_path.read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def refusal(self) -> str | None:
        """Why it refused to start, in one line; None if it did not."""
        record = self.status
        return str(record.get("error")) if record.get("refused") else None

    def last_lines(self, n: int = 12) -> list[str]:
        """The end of its log."""
        try:
            with self.log_path.open(errors="replace") as log:
                return [line.rstrip("\n") for line in deque(log, n)]
        except OSError:
            return []

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens if it is gone."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class EmbeddedCluster:
    """The processes of one plan; use as a context manager to have them stopped."""

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
        """Start everything; `ready` tells when it has arrived."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for spec in plan_processes(self.plan):
            (self.folder / f"{spec.name}.log").unlink(missing_ok=True)
            self.processes[spec.name] = ServiceProcess(spec, self.folder)

    def restart(self, name: str) -> None:
        """Start a process that has ended once more."""
        self.processes[name] = ServiceProcess(self.processes[name].spec, self.folder)

    def ready(self) -> bool:
        """Whether every process that was started says that it is ready."""
        return all(process.stage == "ready" for process in self.processes.values())

    def dead(self) -> list[ServiceProcess]:
        """Processes that have ended."""
        return [p for p in self.processes.values() if p.exit_code is not None]

    def stop(self, grace_s: float = 15.0) -> None:
        """Stop all in order, each role before the next; what doesn't obey is killed."""
        for role in START_ORDER:
            members = [p for p in self.processes.values() if p.spec.role == role]
            for process in members:
                process.signal(signal.SIGTERM)
            deadline_s = time.monotonic() + grace_s
            for process in members:
                if not process.wait(max(0.0, deadline_s - time.monotonic())):
                    process.signal(signal.SIGKILL)
                    process.wait(grace_s)
