"""A cluster whose metadata server is a real Redis, which outlives a conductor."""

import signal

import pytest

from tests.e2e.conftest import StartCluster
from tests.e2e.redis_server import RedisServer
from tests.installed_programs import needs_programs

pytestmark = [
    pytest.mark.e2e,
    needs_programs("redis-server"),
]

KEY = "only good for a test of Redis"


def test_a_restarted_conductor_finds_its_workers_and_what_they_cache(
    start_cluster: StartCluster, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All services have a cluster key here: messages and bytes between them are encrypted.
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
    prompt = list(range(300))
    with start_cluster("fake://tiny", metadata=redis.url) as cluster:
        before = cluster.complete(prompt=prompt, max_tokens=8, temperature=0)
        cluster.process("conductor-0").signal(signal.SIGKILL)
        cluster.restart("conductor-0")

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
