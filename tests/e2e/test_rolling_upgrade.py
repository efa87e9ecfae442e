"""A cluster of the build before is upgraded process by process, under load, without a lost request.

The build before is taken from this repository's history. Each process of it is stopped and comes
back as one of this build, while the others go on: so old and new services talk to each other in
every pair of roles, in both directions.
"""

import io
import os
import signal
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata import open_store
from halfmoon_protocol import features
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import MEMBERS
from tests.e2e.redis_server import RedisServer
from tests.e2e.steady_load import Load, restart, restart_in_turn
from tests.installed_programs import needs_programs

#: The last build without versions and features in its records.
BEFORE = "788f44dcc3cc17485097b5ad1eefa888e90fe44e"
HOME = Path(__file__).resolve().parents[2]
#: Features that records of this build name; older ones name none.
NEW = {features.ALL, ()}
BLOCK = 16
N_LONG = 300
#: Streams that are opened one after another until each decode worker has one.
MAX_STREAMS = 6

pytestmark = [
    pytest.mark.e2e,
    needs_programs("redis-server", "git"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def path_before(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The packages of the build before, as a PYTHONPATH."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(
        ["git", "-C", str(HOME), "archive", BEFORE, "libs", "services"], capture_output=True
    )
    if archive.returncode:
        pytest.skip(f"{BEFORE} is not in this clone's history: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    packages = [p for p in folder.glob("*/*") if p.is_dir() and not p.name.endswith("-native")]
    return os.pathsep.join(map(str, packages))


def records(url: str) -> dict[str, WorkerInfo]:
    """The members' records, by name."""
    store = open_store(url)
    try:
        found = store.list(MEMBERS)
    finally:
        store.close()
    return {
        key.removeprefix(MEMBERS): msgspec.json.decode(value, type=WorkerInfo)
        for key, value in found.items()
    }


def check_reuse(cluster: Any, *, number: int) -> None:
    """Send a new prompt, and again until its blocks are known: all whole ones are cached then."""
    prompt = [(number * 29 + i * 53 + 7) % 300 for i in range(6 * BLOCK + 4)]

    def n_cached() -> int:
        usage = cluster.complete(prompt=prompt, max_tokens=2, temperature=0)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert n_cached() == 0
    seen: list[int] = []

    def is_known() -> bool:
        seen.append(n_cached())
        return seen[-1] > 0

    cluster.until(is_known)
    assert seen[-1] == 6 * BLOCK


def paths_in(direction: str, path_before: str) -> tuple[str, str]:
    """PYTHONPATH of the build that a cluster is moved from, and of the one that it is moved to."""
    own = os.environ.get("PYTHONPATH", "")
    return (path_before, own) if direction == "up" else (own, path_before)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_cluster_is_moved_between_two_builds_and_loses_no_request(
    start_cluster: Callable[..., Any],
    redis: RedisServer,
    path_before: str,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Up to this build, and back down: an upgrade that does not please can be undone."""
    paths = paths_in(direction, path_before)
    monkeypatch.setenv("PYTHONPATH", paths[0])
    tcp = ["--transfer-backends", "tcp", "--block-size", str(BLOCK)]
    with start_cluster(
        "fake://moon?step_s=0.01",
        metadata=redis.url,
        n_prefill=2,
        n_decode=2,
        served_model_name="moon",
        extra={"prefill": tcp, "decode": tcp, "kvstore": tcp[:2]},
    ) as cluster:
        with Load(cluster.url) as load:
            told = {name: info.features for name, info in records(redis.url).items()}
            assert told and set(told.values()) <= ({None} if direction == "up" else NEW)
            monkeypatch.setenv("PYTHONPATH", paths[1])
            # One version alone has the same number: each whole block of a prompt is cached.
            check_reuse(cluster, number=100)
            restart_in_turn(cluster, load, after_turn=lambda n: check_reuse(cluster, number=n))
            told = {name: info.features for name, info in records(redis.url).items()}
            assert told and set(told.values()) <= (NEW if direction == "up" else {None})
        assert load.all_ended, cluster.last_words()
        assert not load.faults
        for log in cluster.cluster.folder.glob("*.log"):
            assert "message_failed" not in log.read_text(), log.read_text()[-4000:]


class Streams:
    """Long greedy answers that are streamed at the same time, each by a thread."""

    def __init__(self, cluster: Any, n_before: int) -> None:
        self._cluster = cluster
        self._n_before = n_before
        self._threads: list[threading.Thread] = []
        self.prompts: list[list[int]] = []
        self.tokens: list[list[int]] = []

    def open_until_each_has_one(self, workers: set[str]) -> None:
        """Open one stream after another, until each of these decode workers generates one."""
        while not workers <= self._decode_workers():
            assert len(self.prompts) < MAX_STREAMS, self._decode_workers()
            number = self._n_before + len(self.prompts)
            self.prompts.append([(number * 31 + i * 41 + 3) % 300 for i in range(50)])
            self.tokens.append([])
            thread = threading.Thread(target=self._run, args=(len(self.prompts) - 1,), daemon=True)
            self._threads.append(thread)
            thread.start()
            self._cluster.until(lambda: len(self.tokens[-1]) > 5)

    def are_whole(self) -> bool:
        """Wait for all answers, and return whether each has the tokens that it should."""
        for thread in self._threads:
            thread.join(120)
        oracle = FakeEngine()
        return self.tokens == [oracle.expected(prompt, N_LONG) for prompt in self.prompts]

    def _decode_workers(self) -> set[str]:
        placed = self._cluster.decisions()[-len(self.prompts) :] if self.prompts else []
        return {str(decision["placement"]["decode"]) for decision in placed}

    def _run(self, number: int) -> None:
        body = {
            "model": "moon",
            "prompt": self.prompts[number],
            "max_tokens": N_LONG,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        url = f"{self._cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in msgspec.json.decode(line.removeprefix("data: "))["choices"]:
                        self.tokens[number] += choice.get("token_ids") or []


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_decode_worker_that_is_killed_beside_one_of_another_build_costs_no_token(
    start_cluster: Callable[..., Any],
    redis: RedisServer,
    path_before: str,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Streams of a killed worker go on at one of the other build: old at new, and new at old."""
    paths = paths_in(direction, path_before)
    build_of = {"decode-0": paths[0], "decode-1": paths[1]}
    monkeypatch.setenv("PYTHONPATH", paths[0])
    tcp = ["--transfer-backends", "tcp", "--block-size", str(BLOCK)]
    with start_cluster(
        "fake://moon?step_s=0.02",
        metadata=redis.url,
        n_decode=2,
        n_kvstore=0,
        served_model_name="moon",
        # The third stream at the latest goes to the other one.
        extra={"prefill": tcp, "decode": [*tcp, "--max-running", "2"]},
    ) as cluster:
        monkeypatch.setenv("PYTHONPATH", paths[1])
        restart(cluster, ("decode-1",))
        told = {name: info.features for name, info in records(redis.url).items()}
        assert (told["decode-0"] is None) != (told["decode-1"] is None), told
        n_before = 0
        for killed in ("decode-0", "decode-1"):
            streams = Streams(cluster, n_before)
            streams.open_until_each_has_one({"decode-0", "decode-1"})
            n_before += len(streams.prompts)
            cluster.process(killed).signal(signal.SIGKILL)
            assert all(len(tokens) < N_LONG for tokens in streams.tokens)
            assert streams.are_whole(), cluster.logs()
            cluster.until(lambda name=killed: name not in cluster.live())
            monkeypatch.setenv("PYTHONPATH", build_of[killed])
            cluster.cluster.restart(killed)
            cluster.until(lambda: {"decode-0", "decode-1"} <= set(cluster.live()))
