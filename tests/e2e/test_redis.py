"""A cluster whose metadata server is a real Redis, which outlives a conductor."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import httpx
import pytest

from tests.e2e.redis_server import RedisServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(which("redis-server") is None, reason="redis-server is not installed"),
]

StartCluster = Callable[..., Any]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def test_a_restarted_conductor_finds_its_workers_and_what_they_cache(
    start_cluster: StartCluster, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All services have a cluster key here: messages and bytes between them are encrypted.
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "only good for a test of Redis")
    prompt = list(range(300))
    with start_cluster("fake://tiny", metadata=redis.url) as cluster:
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


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_all_services_stop_in_order_while_the_metadata_server_does_not_answer(
    start_cluster: StartCluster, redis: RedisServer, how: str
) -> None:
    with start_cluster("fake://tiny", metadata=redis.url) as cluster:
        if how == "killed":
            redis.kill()
        else:
            redis.freeze()
        for process in cluster.cluster.processes.values():
            process.signal(signal.SIGTERM)
        for name, process in cluster.cluster.processes.items():
            assert process.wait(60), f"{name} has not ended\n{cluster.last_words()}"
            assert process.exit_code == 0, cluster.logs()
