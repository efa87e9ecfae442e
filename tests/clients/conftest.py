"""A live cluster, with API keys and without, and an environment of its own for each client.

Environments lie in the user's cache folder and are made when they are first needed; remove the
folder to make them anew. Without a package registry a client's test is skipped and says so.
These tests run with `make test-clients` alone: they install a lot and take minutes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from halfmoon_cli.common.demo_model import demo_model_folder
from halfmoon_cli.up.embedded_cluster import (
    ClusterPlan,
    EmbeddedCluster,
    ProcessSpec,
    ServiceProcess,
)
from halfmoon_conductor.tenants import add_tenant
from halfmoon_metadata.tcp_ports import free_port
from tests.installed_programs import skip_without
from tools.vllm_environment import STOCK, InstallFailed, make_vllm_environment

MODEL = "tiny"
_INSTALL_S, _READY_S = 900, 180.0
_PROGRAMS = Path(__file__).with_name("programs")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "halfmoon"
#: What every client finds: nothing is to be fetched, and no more threads than a small machine has.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "2",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HALFMOON_TEST_CLIENTS"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="`make test-clients` runs it"))


@dataclass(frozen=True)
class Served:
    """What a client is to be pointed at: two conductors of one cluster."""

    #: The one that wants API keys, and a key.
    url: str
    key: str
    #: The one that lets anybody in.
    open_url: str
    #: The model's folder, with its tokenizer.
    model: Path
    #: Where both conductors log, an object a line.
    logs: tuple[Path, ...]

    def answered(self) -> dict[str, int]:
        """Requests by their `X-Request-Id`, and the status of each one's answer."""
        found: dict[str, int] = {}
        for log in self.logs:
            for line in log.read_text().splitlines():
                if '"answered"' in line:
                    record = json.loads(line)
                    found[record["http_request_id"]] = record["status"]
        return found

    def metric(self, name: str) -> float:
        """A counter's value, of both conductors together."""
        total = 0.0
        for url in (self.url, self.open_url):
            for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
                if line.startswith(f"{name} "):
                    total += float(line.partition(" ")[2])
        return total


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """What `halfmoon up` serves, or what HALFMOON_CLIENTS_MODEL names."""
    if named := os.environ.get("HALFMOON_CLIENTS_MODEL"):
        return Path(named)
    return demo_model_folder()


@pytest.fixture(scope="session")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    key = add_tenant(folder / "tenants.toml", "clients")
    exact = ["--dtype", "float32", "--block-size", "16"]
    conductor = ["--log-level", "debug", "--log-format", "json", "--tool-call-parser", "hermes"]
    guarded = ["--tenants", str(folder / "tenants.toml")]
    plan = ClusterPlan(
        model=str(model_folder),
        served_model_name=MODEL,
        http_port=free_port(),
        n_prefill=2,
        n_decode=2,
        n_kvstore=2,
        extra={"prefill": exact, "decode": exact, "conductor": [*conductor, *guarded]},
    )
    # A second conductor of the same workers, which asks nobody for a key.
    port = free_port()
    unguarded = ProcessSpec(
        "conductor-1",
        "conductor",
        (
            "--metadata", plan.metadata_url, "--http-port", str(port), "--host", plan.host,
            "--model", plan.model, "--served-model-name", MODEL, "--worker-id", "conductor-1",
            *conductor,
        ),
    )  # fmt: skip
    with EmbeddedCluster(plan, folder / "state") as cluster:
        cluster.processes["conductor-1"] = ServiceProcess(unguarded, cluster.folder)
        urls = plan.url, f"http://{plan.host}:{port}"
        deadline = time.monotonic() + _READY_S
        while not (cluster.ready() and all(map(_answers, urls))):
            assert not cluster.dead(), "a process of the cluster died"
            assert time.monotonic() < deadline, f"the cluster is not ready within {_READY_S} s"
            time.sleep(0.1)
        logs = tuple(cluster.processes[f"conductor-{i}"].log_path for i in range(2))
        yield Served(urls[0], key, urls[1], model_folder, logs)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_client(served: Served) -> Run:
    """Runs a command with the cluster's address in its environment; its output on failure."""

    def run(
        *command: str | Path, cwd: Path | None = None, within_s: float = 240, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        told = {"URL": served.url, "KEY": served.key, "MODEL": MODEL}
        variables |= {f"HALFMOON_{name}": value for name, value in told.items()}
        done = subprocess.run(
            [str(each) for each in command],
            cwd=cwd,
            env={**os.environ, **_QUIET, "PYTHONPATH": "", **variables},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def python_with() -> Callable[..., Path]:
    """The interpreter of an environment that has these packages."""

    def make(name: str, *requirements: str) -> Path:
        folder = _CACHE / "client-venvs" / f"{name}-{sys.implementation.cache_tag}"
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _or_skip(sys.executable, "-m", "venv", folder)
            pip = folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"
            _or_skip(*pip, "install", *requirements)
            (folder / ".complete").touch()
        return folder / "bin" / "python"

    return make


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The folder of the commands of vLLM's CPU build, in the environment of benchmarks."""
    try:
        return make_vllm_environment(STOCK).parent
    except InstallFailed as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def node_with() -> Callable[..., Path]:
    """A folder whose programs find these npm packages."""

    def make(name: str, *packages: str) -> Path:
        skip_without("node", "npm")
        folder = _CACHE / "client-node" / name
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _or_skip("npm", "install", "--silent", "--prefix", folder, *packages)
            (folder / ".complete").touch()
        return folder

    return make


@pytest.fixture
def program() -> Callable[[str], Path]:
    """One of the programs that a client's environment runs."""
    return _PROGRAMS.joinpath


def _or_skip(*command: str | Path) -> None:
    """Do it, or say why this machine can't."""
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [str(each) for each in command],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            timeout=_INSTALL_S,
            check=False,
        )
        if done.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"{command[0]} could not install it: {last}")
