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
