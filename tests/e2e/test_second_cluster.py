"""A second cluster at one metadata server: refused in one line, and the first one goes on.

The server is the product's own over HTTP, without a token, as Redis and etcd have none either.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from halfmoon_metadata import MemoryStore, open_store
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.membership import GENERATIONS
from halfmoon_sandbox.bound_process import start_bound
from tests.metadata.conftest import HttpServer
from tests.programs import run_program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FAKE = "fake://tiny?step_s=0.001"
FIRST = "the moon is made of green cheese"
SECOND = "the moon is made of blue cheese"

StartCluster = Callable[..., Any]


@pytest.fixture
def metadata() -> Iterator[str]:
    server = HttpServer(MemoryStore())
    yield f"http://127.0.0.1:{server.port}/metadata"
    server.stop()


def up_until_it_ends(folder: Path, metadata: str, *words: str, key: str) -> tuple[int, str]:
    """Run `halfmoon up` of a second cluster, and return its status and what it printed."""
    environment = {**os.environ, "COLUMNS": "300", "MODEL": FAKE, "PORT": str(free_port())}
    environment.pop("HALFMOON_CLUSTER_KEY_FILE", None)
    environment["HALFMOON_CLUSTER_KEY"] = key
    ended = run_program(
        *("halfmoon_cli", "up", "--metadata", metadata, *words),
        joined=True, timeout_s=300, env=environment, cwd=folder,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def starts(metadata: str) -> dict[str, bytes]:
    return open_store(metadata).list(GENERATIONS)


def test_a_cluster_with_another_key_is_refused_and_the_first_one_loses_nothing(
    start_cluster: StartCluster, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", FIRST)
    with start_cluster(FAKE, metadata=metadata) as cluster:
        counted = starts(metadata)
        prompt = list(range(1, 200))
        cluster.complete(prompt=prompt, max_tokens=2)
        code, printed = up_until_it_ends(tmp_path, metadata, key=SECOND)
        assert code == 2, printed
        line = printed.strip()
        assert line.startswith("halfmoon:") and "\n" not in line, printed
        assert "--cluster NAME" in line and "another cluster" in line
        assert starts(metadata) == counted
        assert not cluster.cluster.dead()
        usage = cluster.complete(prompt=prompt, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_cluster_with_the_same_key_takes_no_name_of_a_worker_that_lives(
    start_cluster: StartCluster, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", FIRST)
    with start_cluster(FAKE, metadata=metadata) as cluster:
        counted = starts(metadata)
        code, printed = up_until_it_ends(tmp_path, metadata, key=FIRST)
        assert code != 0, printed
        said = printed.strip().splitlines()[-1]
        assert said.startswith("halfmoon: worker "), printed
        assert "is in service already" in said and "--cluster NAME" in said
        assert "Traceback" not in printed
        assert starts(metadata) == counted
        assert not cluster.cluster.dead()


def test_a_cluster_with_a_name_of_its_own_shares_the_server(
    start_cluster: StartCluster, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", FIRST)
    with start_cluster(FAKE, metadata=metadata) as cluster:
        output = tmp_path / "output"
        environment = {**os.environ, "MODEL": FAKE, "PORT": str(free_port()), "COLUMNS": "300"}
        environment["HALFMOON_CLUSTER_KEY"] = SECOND
        words = ["up", "--metadata", metadata, "--cluster", "east"]
        with output.open("wb") as sink:
            second = start_bound(
                [sys.executable, "-m", "halfmoon_cli", *words],
                env=environment,
                cwd=tmp_path,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        try:
            cluster.until(lambda: "Ctrl-C stops it" in output.read_text() or second.poll())
            assert second.poll() is None, output.read_text()
            names = {worker["worker_id"] for worker in cluster.get("/debug/cluster")["workers"]}
            assert names == {"prefill-0", "decode-0", "kvstore-0"}
            assert not cluster.cluster.dead()
            assert all(count == b"1" for count in starts(metadata).values())
        finally:
            second.send_signal(signal.SIGTERM)
            second.wait(60)
