"""Clusters of real processes in which workers in TypeScript take the place of ours."""

import fcntl
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_sandbox.bound_process import start_bound
from tests.e2e.conftest import LiveCluster
from tests.installed_programs import skip_without

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "polyglot"
#: A busy machine loads torch slowly.
READY_WITHIN_S = 240.0
LEAST_NODE = 20


def npm(*arguments: str) -> str:
    """Run npm in the example's folder; return what it prints."""
    ran = subprocess.run(
        ["npm", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, f"npm {' '.join(arguments)}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def node_version() -> int:
    """Return the major version of Node."""
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(said.removeprefix("v").partition(".")[0])


@pytest.fixture(scope="session")
def program() -> Path:
    """The folder of the compiled example, installed anew when its lock file has changed."""
    skip_without("npm", "node")
    if (found := node_version()) < LEAST_NODE:
        pytest.skip(f"Node {found} is installed, and the example needs {LEAST_NODE}")
    lock = FOLDER / "package-lock.json"
    installed = FOLDER / "node_modules" / ".package-lock.json"
    # Several test processes share the folder.
    with (FOLDER / ".gitignore").open() as only_one:
        fcntl.flock(only_one, fcntl.LOCK_EX)
        if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
            npm("ci", "--no-audit", "--no-fund")
        npm("run", "build")
    return FOLDER / "dist"


class NodeProcess:
    """A worker in TypeScript."""

    def __init__(
        self, script: Path, log: Path, arguments: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.log_path = log
        with log.open("ab") as output:
            self.process = start_bound(
                ["node", "--enable-source-maps", script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the process, and return its exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class MixedCluster(LiveCluster):
    """A cluster of both kinds of workers, and what tests ask of it."""

    def __init__(self, cluster: EmbeddedCluster, folder: Path, program: Path) -> None:
        key = cluster.plan.environment.get("HALFMOON_CLUSTER_KEY")
        super().__init__(cluster, operator_token(key) if key else "")
        self.folder = folder
        self.nodes: dict[str, NodeProcess] = {}
        self._program = program

    def start_node(self, role: str, name: str, *arguments: str) -> NodeProcess:
        """Start a worker in TypeScript."""
        common = ["--worker-id", name, "--metadata", self.metadata_url]
        environment = dict(self.cluster.plan.environment)
        script = self._program / role / "main.js"
        log = self.folder / f"{name}.log"
        node = NodeProcess(script, log, [*common, *arguments], environment)
        self.nodes[name] = node
        return node

    def dead(self) -> list[str]:
        """Return the workers in TypeScript that have ended."""
        return [name for name, node in self.nodes.items() if node.process.poll() is not None]

    def logs(self, n_lines: int = 40) -> str:
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text()[-80 * n_lines :]}" for p in paths)


StartMixed = Callable[..., Any]


@contextmanager
def mixed_cluster(
    folder: Path, program: Path, nodes: dict[str, list[str]], plan: ClusterPlan
) -> Iterator[MixedCluster]:
    with ExitStack() as stack:
        cluster = stack.enter_context(EmbeddedCluster(plan, folder))
        mixed = MixedCluster(cluster, folder, program)
        stack.callback(lambda: [node.stop(signal.SIGKILL) for node in mixed.nodes.values()])
        for name, arguments in nodes.items():
            mixed.start_node(name.partition("-")[0], name, *arguments)
        expected = plan.n_prefill + plan.n_decode + plan.n_kvstore + len(nodes)

        def is_complete() -> bool:
            assert not cluster.dead() and not mixed.dead(), mixed.logs()
            try:
                ready = httpx.get(f"{plan.url}/ready", timeout=5)
                return ready.status_code == 200 and len(mixed.live()) == expected
            except httpx.HTTPError:
                return False

        mixed.until(is_complete, READY_WITHIN_S)
        yield mixed


@pytest.fixture
def start_mixed(program: Path, tmp_path: Path) -> StartMixed:
    """``with start_mixed(model, nodes={"kvstore-0": []}, n_kvstore=0) as cluster``."""
    numbers = itertools.count()

    def start(model: str, nodes: dict[str, list[str]], **more: Any) -> Any:
        folder = tmp_path / f"cluster-{next(numbers)}"
        plan = ClusterPlan(model=model, http_port=free_port(), **more)
        return mixed_cluster(folder, program, nodes, plan)

    return start
