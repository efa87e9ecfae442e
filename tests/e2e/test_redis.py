"""A cluster whose metadata server is a real Redis, which outlives a conductor."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(which("redis-server") is None, reason="redis-server is not installed"),
]

StartCluster = Callable[..., Any]


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        _until_listening(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait(20)


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.02)
        else:
            return


def test_a_restarted_conductor_finds_its_workers_and_what_they_cache(
    start_cluster: StartCluster, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All services have a cluster key here: messages and bytes between them are encrypted.
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "only good for a test of Redis")
    prompt = list(range(300))
    with start_cluster("fake://tiny", metadata=redis_url) as cluster:
        before = cluster.complete(prompt=prompt, max_tokens=8, temperature=0)
        conductor = cluster.process("conductor-0")
        conductor.signal(signal.SIGKILL)
        assert conductor.wait(20)
        cluster.cluster.restart("conductor-0")

        def answers() -> bool:
            try:
                return len(cluster.live()) == 3
            except httpx.HTTPError:
                return False

        cluster.until(answers)

        def cached() -> int:
            after = cluster.complete(prompt=prompt, max_tokens=8, temperature=0)
            assert after["choices"] == before["choices"]
            return int(after["usage"]["prompt_tokens_details"]["cached_tokens"])

        # The index is built anew from the kvstore's snapshot.
        cluster.until(lambda: cached() == 256)
