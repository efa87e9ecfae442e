"""Clusters of real processes: ZeroMQ, HTTP and transfer as deployed, on loopback."""

import itertools
import json
import signal
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from halfmoon_cli.up.embedded_cluster import (
    ClusterPlan,
    EmbeddedCluster,
    ProcessSpec,
    ServiceProcess,
)
from halfmoon_metadata.cluster_key_source import cluster_key_from_environment
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_testing.models.tiny_models import make_tiny_model
from tests.e2e.redis_server import RedisServer

#: Less than a test may take, so that what kept it is said.
READY_WITHIN_S = 200.0
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


class BrokenStream(Exception):
    """A stream that ended without its last token; the text says how."""


def once(n: int, do: Callable[[], object]) -> Callable[[int], None]:
    """Do something as soon as a stream has so many tokens, of which some may come together."""
    left = [do]

    def note(n_tokens: int) -> None:
        if n_tokens >= n and left:
            left.pop()()

    return note


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
        return httpx.get(f"{self.url}{path}", timeout=10, **self._how).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        """As whom its clients ask, and whom they trust."""
        cluster_key = cluster_key_from_environment()
        key = self.key or (operator_token(cluster_key) if cluster_key else "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return {"headers": headers, "verify": self.verify}

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", model=self.model, **body)
        assert answer.status_code == 200, answer.text
        completion = answer.json()
        assert isinstance(completion, dict)
        return completion

    def ask(self, prompt: Sequence[int], n_new: int) -> tuple[list[int], int]:
        """The tokens of a greedy answer, and how many tokens of its prompt were cached."""
        said = self.complete(prompt=prompt, max_tokens=n_new, **GREEDY)
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return list(said["choices"][0]["token_ids"]), int(cached)

    def events(self, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion, the last line as ``{"done": True}``."""
        url, body = f"{self.url}/v1/completions", {"model": self.model, "stream": True, **body}
        with httpx.stream("POST", url, json=body, timeout=240, **self._how) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    yield {"done": True} if data == "[DONE]" else json.loads(data)

    def stream(
        self,
        prompt: Sequence[int],
        n_new: int,
        on_tokens: Callable[[int], object] = lambda _: None,
        **more: Any,
    ) -> list[int]:
        """The tokens of a greedy stream; `on_tokens` is told how many there are.

        Raises:
            BrokenStream: it ended with an error, or its connection did.
        """
        tokens: list[int] = []
        try:
            for event in self.events(**{"prompt": prompt, "max_tokens": n_new, **GREEDY, **more}):
                if event.get("done"):
                    return tokens
                if "error" in event:
                    raise BrokenStream(f"{event} after {len(tokens)} tokens")
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or ()
                on_tokens(len(tokens))
        except httpx.HTTPError as error:
            raise BrokenStream(f"{type(error).__name__} after {len(tokens)} tokens") from error
        raise BrokenStream(f"no [DONE] after {len(tokens)} tokens")

    def chosen(self, role: str) -> str:
        """The worker of this role that the last request was placed at."""
        placement = self.decisions()[-1]["placement"]
        return str(placement["decode"] if role == "decode" else placement["chosen"]["worker_id"])

    def metrics(self, name: str = "", **labels: str) -> dict[str, float]:
        """Samples of a worker (or the conductor) that have these labels, by name, added up."""
        url = self.process(name).status["operators"] if name else self.url
        page = httpx.get(f"{url}/metrics", timeout=30, **self._how)
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(page.raise_for_status().text):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    @property
    def model(self) -> str:
        return str(self.get("/v1/models")["data"][0]["id"])

    def live(self) -> list[str]:
        """Workers that the conductor uses."""
        workers = self.workers().values()
        return sorted(w["worker_id"] for w in workers if not w["refused"] and not w["draining"])

    def workers(self) -> dict[str, dict[str, Any]]:
        """What the conductor knows of each worker; nothing while it does not answer."""
        try:
            found = self.get("/debug/cluster")["workers"]
        except httpx.HTTPError:
            return {}
        return {worker["worker_id"]: worker for worker in found}

    def n_indexed(self) -> int:
        """Blocks that the conductor knows of."""
        loads = [w["load"] for w in self.workers().values() if w["role"] == "kvstore"]
        return sum(int(load["n_indexed"]) for load in loads)

    def restart(self, *names: str) -> None:
        """Start ended processes again, and wait until the conductor uses all workers."""
        for name in names:
            assert self.process(name).wait(90), f"{name} has not ended\n{self.last_words()}"
            self.cluster.restart(name)
        workers = sorted(name for name in self.cluster.processes if not name.startswith("cond"))
        self.until(lambda: self.live() == workers)

    def decisions(self) -> list[dict[str, Any]]:
        found = self.get("/debug/decisions")["decisions"]
        assert isinstance(found, list)
        return found

    def until(self, condition: Callable[..., object], within_s: float = 120.0) -> None:
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


@contextmanager
def lone_conductor(
    folder: Path, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """A conductor that is ready, with ports of its own, the metadata server, and no worker."""
    ports = [f"--{name}-port=0" for name in ("http", "metadata", "metrics")]
    arguments = ("--model=fake://tiny", "--metadata=embedded", *ports, *flags)
    spec = ProcessSpec("conductor-0", "conductor", arguments)
    process = ServiceProcess(spec, folder, environment or {})
    try:
        deadline = time.monotonic() + READY_WITHIN_S
        while process.stage != "ready":
            assert process.exit_code is None and time.monotonic() < deadline, process.last_lines()
            time.sleep(0.02)
        yield process
    finally:
        process.signal(signal.SIGTERM)
        process.wait(60)


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
def alone(tiny_model: Path) -> Any:
    """What transformers says of `tiny_model`: ``alone.generate(prompt, n_new)``."""
    from tests.e2e.transformers_alone import Transformers

    return Transformers(tiny_model)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))
