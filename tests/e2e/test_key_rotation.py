"""A cluster's key is changed under load, as docs/operating.md says, and no request is lost.

Every process is restarted for each step, and all requests are answered at the first try. There is
one exception: the cluster has one conductor, and while that is restarted, its clients' connections
are refused. They repeat those requests, and no others.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from shutil import which
from typing import Any

import httpx
import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_runtime.observability.operator_http import operator_token
from tests.e2e.redis_server import RedisServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(which("redis-server") is None, reason="redis-server is not installed"),
    pytest.mark.timeout(600),
]

OLD = "the moon is made of green cheese"
NEW = "the moon is made of blue cheese"
#: Text of the key file at each step; every process is restarted after each.
STEPS = (f"{OLD}\n{NEW}", f"{NEW}\n{OLD}", NEW)
#: What is restarted together: while one of two workers is away, the other one serves.
TURNS = (("kvstore-0",), ("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("conductor-0",))
N_CLIENTS = 3
N_NEW = 24
#: What a log would say if two neighbouring steps did not know each other, or a key itself.
FAULTS = (
    "cluster key",
    "unknown_key",
    "stranger",
    "Untrusted",
    "did not accept this",
    "handshake",
    "cheese",
)

StartCluster = Callable[..., Any]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


class Load:
    """Clients that send one request after another, and check each answer."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._ended, self._away = threading.Event(), threading.Event()
        self._oracle = FakeEngine()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"client {i}", daemon=True)
            for i in range(N_CLIENTS)
        ]
        self.n_right = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    @property
    def all_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    @contextmanager
    def without_conductor(self) -> Iterator[None]:
        """Let clients repeat requests that the conductor refuses meanwhile."""
        self._away.set()
        yield
        self._away.clear()

    def _run(self, number: int) -> None:
        dice = Random(number)
        while not self._ended.is_set():
            # Half of a prompt is one of four, so that blocks of kvstores are read.
            start = dice.randrange(4) * 101
            prompt = [(start + i * 37) % 300 for i in range(128)]
            prompt += [dice.randrange(300) for _ in range(dice.randrange(1, 128))]
            fault = self._check_answer(prompt)
            with self._lock:
                self.n_right += not fault
                self.faults += [fault] * bool(fault)

    def _check_answer(self, prompt: list[int]) -> str:
        """Send one request until it is answered; return what is wrong with the answer."""
        body = {
            "model": "moon",
            "prompt": prompt,
            "max_tokens": N_NEW,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        while True:
            was_away = self._away.is_set()
            try:
                answer = httpx.post(self._url, json=body, timeout=60, trust_env=False)
            except httpx.TransportError as error:
                status, said = 503, repr(error)
            else:
                status, said = answer.status_code, answer.text
            if status == 200:
                tokens = answer.json()["choices"][0]["token_ids"]
                return "" if tokens == self._oracle.expected(prompt, N_NEW) else said
            if status != 503 or not (was_away or self._away.is_set()):
                return f"{status}: {said}"
            time.sleep(0.05)


def restart(cluster: Any, names: tuple[str, ...]) -> None:
    """Stop these processes, start them again, and wait until the conductor uses all workers."""

    def live() -> list[str]:
        try:
            return list(cluster.live())
        except httpx.HTTPError:
            return []

    everyone = live()
    for name in names:
        cluster.process(name).signal(signal.SIGTERM)
    for name in names:
        assert cluster.process(name).wait(90), f"{name} has not ended\n{cluster.last_words()}"
        assert cluster.process(name).exit_code == 0, cluster.logs()
    if names != ("conductor-0",):
        cluster.until(lambda: not set(names) & set(live()))
    for name in names:
        cluster.cluster.restart(name)

    def all_there() -> bool:
        assert not cluster.cluster.dead(), cluster.logs()
        return cluster.cluster.ready() and live() == everyone

    cluster.until(all_there)


def test_a_cluster_whose_key_is_changed_step_by_step_loses_no_request(
    start_cluster: StartCluster, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster-key"
    file.touch(0o600)
    file.write_text(OLD)
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", str(file))
    tcp = ["--transfer-backends", "tcp", "--block-size", "16"]
    extra = {"prefill": tcp, "decode": tcp, "kvstore": tcp[:2]}
    with start_cluster(
        "fake://moon?step_s=0.01",
        metadata=redis.url,
        n_prefill=2,
        n_decode=2,
        served_model_name="moon",
        extra=extra,
    ) as cluster:
        with Load(cluster.url) as load:
            for text in STEPS:
                file.write_text(text)
                for names in TURNS:
                    n_right = load.n_right
                    is_conductor = names == ("conductor-0",)
                    with load.without_conductor() if is_conductor else nullcontext():
                        restart(cluster, names)
                    # All kinds of connections between old and new processes are used.
                    cluster.until(lambda n=n_right: load.n_right >= n + 2 * N_CLIENTS)
                    assert not load.faults
        assert load.all_ended, cluster.last_words()
        assert not load.faults
        for key, status in ((OLD, 401), (NEW, 200)):
            shown = {"authorization": f"Bearer {operator_token(key)}"}
            url = f"{cluster.url}/debug/cluster"
            assert httpx.get(url, headers=shown, timeout=10).status_code == status
        for log in cluster.cluster.folder.glob("*.log"):
            said = log.read_text()
            assert not [fault for fault in FAULTS if fault in said], f"{log.name}\n{said[-4000:]}"
