"""A live cluster with API keys, and an environment of its own for each client.

Environments lie in the user's cache folder and are made when they are first needed; remove the
folder to make them anew. Without a package registry a client's test is skipped and says so.
These tests run with `make test-clients` alone: they install a lot and take minutes.
"""

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

from halfmoon_cli.cluster import Cluster, ClusterPlan, free_port
from halfmoon_conductor.tenants import add
from halfmoon_engine.testing import make_tiny_model

MODEL = "tiny"
_INSTALL_S, _READY_S = 900, 180.0
_PROGRAMS = Path(__file__).with_name("programs")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "halfmoon"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HALFMOON_TEST_CLIENTS"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="`make test-clients` runs it"))


@dataclass(frozen=True)
class Served:
    """What a client is to be pointed at."""

    url: str
    key: str
    tokenizer: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    key = add(folder / "tenants.toml", "clients")
    model = make_tiny_model("qwen3", folder / "model")
    exact = ["--dtype", "float32", "--block-size", "16"]
    plan = ClusterPlan(
        model=str(model),
        served_model_name=MODEL,
        http_port=free_port(),
        n_prefill=2,
        n_decode=2,
        n_kvstore=2,
        extra={
            "prefill": exact,
            "decode": exact,
            "conductor": ["--tenants", str(folder / "tenants.toml")],
        },
    )
    with Cluster(plan, folder / "state") as cluster:
        deadline = time.monotonic() + _READY_S
        while not (cluster.ready() and _answers(plan.url)):
            assert not cluster.dead(), "a process of the cluster died"
            assert time.monotonic() < deadline, f"the cluster is not ready within {_READY_S} s"
            time.sleep(0.1)
        yield Served(plan.url, key, model)


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
        done = subprocess.run(
            [str(each) for each in command],
            cwd=cwd,
            env={
                **os.environ,
                "PYTHONPATH": "",
                "HALFMOON_URL": served.url,
                "HALFMOON_KEY": served.key,
                "HALFMOON_MODEL": MODEL,
                **variables,
            },
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
            _or_skip(
                folder / "bin" / "python", "-m", "pip", "install", "--quiet",
                "--disable-pip-version-check", *requirements,
            )  # fmt: skip
            (folder / ".complete").touch()
        return folder / "bin" / "python"

    return make


@pytest.fixture(scope="session")
def node_with() -> Callable[..., Path]:
    """A folder whose programs find these npm packages."""

    def make(name: str, *packages: str) -> Path:
        if shutil.which("node") is None or shutil.which("npm") is None:
            pytest.skip("node and npm are not installed here")
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
