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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halfmoon_metadata import open_store
from halfmoon_protocol import features
from halfmoon_protocol.messages import WorkerInfo
from halfmoon_runtime.membership import MEMBERS
from tests.e2e.redis_server import RedisServer
from tests.e2e.steady_load import Load, restart_in_turn
from tests.installed_programs import needs_programs

#: The last build without versions and features in its records.
BEFORE = "788f44dcc3cc17485097b5ad1eefa888e90fe44e"
HOME = Path(__file__).resolve().parents[2]
#: Features that records of this build name; older ones name none.
NEW = {features.ALL, ()}
BLOCK = 16

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
        return int(cluster.ask(prompt, 2)[1])

    assert n_cached() == 0
    seen: list[int] = []

    def is_known() -> bool:
        seen.append(n_cached())
        return seen[-1] > 0

    cluster.until(is_known)
    assert seen[-1] == 6 * BLOCK


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_cluster_is_moved_between_two_builds_and_loses_no_request(
    start_cluster: Callable[..., Any],
    redis: RedisServer,
    path_before: str,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """Up to this build, and back down: an upgrade that does not please can be undone.

    A decode worker is killed in the middle of answers, beside one that is of the other build.
    """
    own = os.environ.get("PYTHONPATH", "")
    paths = (path_before, own) if direction == "up" else (own, path_before)
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

            def kill_the_last(names: tuple[str, ...]) -> signal.Signals:
                if "decode-1" not in names:
                    return signal.SIGTERM
                cluster.until(lambda: cluster.workers()["decode-1"]["load"]["n_running"] > 0)
                return signal.SIGKILL

            restart_in_turn(
                cluster,
                load,
                by=kill_the_last,
                after_turn=lambda n: check_reuse(cluster, number=n),
            )
            told = {name: info.features for name, info in records(redis.url).items()}
            assert told and set(told.values()) <= (NEW if direction == "up" else {None})
        assert load.all_ended, cluster.last_words()
        assert not load.faults
        for log in cluster.cluster.folder.glob("*.log"):
            assert "message_failed" not in log.read_text(), log.read_text()[-4000:]
