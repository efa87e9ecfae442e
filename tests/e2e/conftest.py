"""Clusters of real processes: ZeroMQ, HTTP and transfer as deployed, on loopback."""

import itertools
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster, ServiceProcess
from halfmoon_metadata.cluster_key_source import cluster_key_from_environment
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.redis_server import RedisServer

#: Less than a test may take, so that what kept it is said.
READY_WITHIN_S = 200.0


@dataclass
class LiveCluster:
    """A cluster that is ready, and what tests ask of it."""

    cluster: EmbeddedCluster
    #: Of an operator, where there are tenants.
    key: str = ""

    @property
    def url(self) -> str:
        return self.cluster.plan.url

    @property
    def metadata_url(self) -> str:
        return self.cluster.plan.metadata_url

    def process(self, name: str) -> ServiceProcess:
        return self.cluster.processes[name]

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """What its clients trust; True where it serves no TLS."""
        plan = self.cluster.plan
        return trust_context(plan.tls_ca) if plan.is_tls else True

    def get(self, path: str) -> Any:
        answer = httpx.get(
            f"{self.url}{path}", timeout=10, headers=self._headers, verify=self.verify
        )
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}{path}",
            json=body,
            timeout=60,
            headers=self._headers,
            verify=self.verify,
        )

    @property
    def _headers(self) -> dict[str, str]:
        cluster_key = cluster_key_from_environment()
        key = self.key or (operator_token(cluster_key) if cluster_key else "")
        return {"authorization": f"Bearer {key}"} if key else {}

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", model=self.model, **body)
        assert answer.status_code == 200, answer.text
        completion = answer.json()
        assert isinstance(completion, dict)
        return completion

    @property
    def model(self) -> str:
        return str(self.get("/v1/models")["data"][0]["id"])

    def live(self) -> list[str]:
        """Workers that the conductor uses."""
        workers = self.get("/debug/cluster")["workers"]
        return sorted(w["worker_id"] for w in workers if not w["refused"] and not w["draining"])

    def decisions(self) -> list[dict[str, Any]]:
        found = self.get("/debug/decisions")["decisions"]
        assert isinstance(found, list)
        return found

    def until(self, condition: Callable[[], bool], within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_s} s\n{self.last_words()}"
            time.sleep(0.02)

    def logs(self, n_lines: int = 25) -> str:
        return "\n".join(
            f"--- {name} ({process.stage}, exit {process.exit_code})\n"
            + "\n".join(process.last_lines(n_lines))
            for name, process in self.cluster.processes.items()
        )

    def last_words(self) -> str:
        """What all threads of all processes are doing; they die of saying it."""
        for process in self.cluster.processes.values():
            process.signal(signal.SIGABRT)
            process.wait(10)
        return self.logs(100)


@contextmanager
def _cluster(folder: Path, model: str, key: str, **more: Any) -> Iterator[LiveCluster]:
    # A tiny model's speed says nothing, and costs each worker a second. A fake one's is its spec's.
    measured = {} if model.startswith("fake://") else {"HALFMOON_MEASURE": "false"}
    environment = {**measured, **more.pop("environment", {})}
    plan = ClusterPlan(model=model, http_port=free_port(), environment=environment, **more)
    with EmbeddedCluster(plan, folder) as cluster:
        live = LiveCluster(cluster, key)

        def answers() -> bool:
            assert not cluster.dead(), live.logs()
            if not cluster.ready():
                return False
            try:
                ready = httpx.get(f"{plan.url}/ready", timeout=5, verify=live.verify)
                return ready.status_code == 200
            except httpx.HTTPError:
                return False

        live.until(answers, READY_WITHIN_S)
        expected = plan.n_prefill + plan.n_decode + plan.n_kvstore
        live.until(lambda: len(live.live()) == expected)
        yield live


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


StartCluster = Callable[..., AbstractContextManager[LiveCluster]]


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """``with start_cluster(model, n_decode=2) as cluster``; `key` is an operator's."""
    numbers = itertools.count()

    def start(model: str, *, key: str = "", **more: Any) -> AbstractContextManager[LiveCluster]:
        folder = tmp_path_factory.mktemp(f"cluster-{next(numbers)}")
        return _cluster(folder, model, key, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONFAULTHANDLER", "1")  # for `LiveCluster.last_words`
        yield start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))
