"""The cluster of docker-compose.yml, built and started once, and what tests do to it."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port, is_free
from halfmoon_runtime.observability.operator_tokens import operator_token

ROOT = Path(__file__).parents[2]
BUILT_WITHIN_S = 1500.0
READY_WITHIN_S = 600.0


def two_free_ports() -> tuple[int, int]:
    """One after the other."""
    while True:
        first = free_port()
        if is_free(first + 1):
            return first, first + 1


#: One for each conductor; a restarted one takes the one that it left.
PORTS = two_free_ports()
#: What another cluster on this machine may have too.
OWN = {
    "HTTP_PORT": f"{PORTS[0]}-{PORTS[1]}",
    "CONTROL_SUBNET": "172.30.18.0/24",
    "PAYLOAD_SUBNET": "172.30.19.0/24",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HALFMOON_TEST_COMPOSE"):
        return
    skip = pytest.mark.skip(reason="needs a Docker engine and minutes: make e2e-compose")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


def folder_with_torch() -> str | None:
    """A folder that pip is told to look in and that has a build of torch."""
    told = subprocess.run(
        ["pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    named = [os.environ.get("WHEELS_DIR", "")]
    named += [line.partition("=")[2].strip("'") for line in told if "find-links" in line]
    for folder in filter(None, named):
        if any(Path(folder).glob("torch-*.whl")):
            return folder
    return None


def run(*command: str, timeout_s: float = 300.0, **more: str) -> str:
    """What a command prints; AssertionError with all of it when it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Container:
    """One container."""

    name: str

    def inspect(self) -> dict[str, Any]:
        found = json.loads(run("docker", "inspect", self.name))[0]
        assert isinstance(found, dict)
        return found

    @property
    def is_healthy(self) -> bool:
        return bool(self.inspect()["State"].get("Health", {}).get("Status") == "healthy")

    @property
    def pid(self) -> int:
        return int(self.inspect()["State"]["Pid"])

    @property
    def worker_id(self) -> str:
        """The name of the worker in it, as its image makes it."""
        config = self.inspect()["Config"]
        role = config["Labels"]["com.docker.compose.service"]
        return role if role.startswith("kvstore") else f"{role}-{config['Hostname']}"

    def execute(self, *command: str) -> str:
        return run("docker", "exec", self.name, *command)


class Compose:
    """The cluster of one compose project."""

    project = "halfmoon-test"

    def __init__(self, files: list[Path], environment: dict[str, str]) -> None:
        #: With these variables ``docker compose`` in any folder is about this cluster.
        self.environment = {
            **environment,
            "COMPOSE_PROJECT_NAME": self.project,
            "COMPOSE_FILE": os.pathsep.join(str(file) for file in files),
        }

    def __call__(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """``docker compose …``."""
        return run("docker", "compose", *arguments, timeout_s=timeout_s, **self.environment)

    def docker(self, *arguments: str) -> str:
        """``docker …``."""
        return run("docker", *arguments)

    def up(self, *arguments: str) -> None:
        wait = ("--wait", "--wait-timeout", str(int(READY_WITHIN_S)))
        try:
            self("up", "-d", *wait, *arguments, timeout_s=READY_WITHIN_S + 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def containers(self, service: str) -> list[Container]:
        """Those that run now."""
        return [Container(name) for name in self("ps", "--format", "{{.Name}}", service).split()]

    @property
    def urls(self) -> list[str]:
        """Where the conductors answer."""
        found = []
        for container in self.containers("conductor"):
            ports = container.inspect()["NetworkSettings"]["Ports"]["8000/tcp"]
            found.append(f"http://127.0.0.1:{ports[0]['HostPort']}")
        return found

    @property
    def cluster_key(self) -> str:
        """The key that the first start made."""
        return self.containers("conductor")[0].execute("cat", "/run/halfmoon/cluster-key").strip()

    def get(self, path: str) -> Any:
        shown = {"authorization": f"Bearer {operator_token(self.cluster_key)}"}
        answer = httpx.get(f"{self.urls[0]}{path}", timeout=30, headers=shown)
        answer.raise_for_status()
        return answer.json()

    def complete(self, prompt: list[int], n_new: int) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": n_new, "temperature": 0}
        answer = httpx.post(
            f"{self.urls[0]}/v1/completions", json={**body, "ignore_eos": True}, timeout=240
        )
        assert answer.status_code == 200, answer.text
        completion = answer.json()
        assert isinstance(completion, dict)
        return completion

    def live(self) -> set[str]:
        """Workers that the conductor uses."""
        workers = self.get("/debug/cluster")["workers"]
        return {w["worker_id"] for w in workers if not w["refused"] and not w["draining"]}

    def last_placement(self) -> tuple[str, str]:
        """The prefill and the decode worker of the last request."""
        placement = self.get("/debug/decisions")["decisions"][-1]["placement"]
        return str(placement["chosen"]["worker_id"]), str(placement["decode"])

    def until(self, condition: Callable[[], bool], within_s: float = 300.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return self("ps", "-a") + self("logs", "--tail", "15", "--no-color")


@pytest.fixture(scope="session")
def images() -> Iterator[Compose]:
    """The project with all images built; no container runs, and none stays."""
    files, environment = [ROOT / "docker-compose.yml"], dict(OWN)
    if (wheels := folder_with_torch()) is not None:
        files.append(ROOT / "tests/compose/wheels.yml")
        environment["WHEELS_DIR"] = wheels
    compose = Compose(files, environment)
    compose("down", "--volumes", "--remove-orphans")
    began_s = time.monotonic()
    compose("build", timeout_s=BUILT_WITHIN_S)
    print(f"images built in {time.monotonic() - began_s:.0f} s")
    try:
        yield compose
    finally:
        compose("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="session")
def compose(images: Compose) -> Compose:
    """The cluster, started."""
    began_s = time.monotonic()
    images.up()
    print(f"all containers well {time.monotonic() - began_s:.0f} s later")
    return images
