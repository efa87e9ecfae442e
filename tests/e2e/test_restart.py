"""A conductor that is started again, and the order in which a cluster is stopped."""

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

FAKE = "fake://restart?max_context=2048"
StartCluster = Callable[..., Any]


def test_workers_need_no_restart_when_the_embedded_metadata_server_starts_again(
    start_cluster: StartCluster,
) -> None:
    """As docs/operating.md says; then all are stopped, the conductor first, as it advises."""
    with start_cluster(FAKE) as cluster:
        cluster.complete(prompt=list(range(200)), max_tokens=4)
        conductor = cluster.process("conductor-0")
        conductor.signal(signal.SIGTERM)
        assert conductor.wait(60)
        assert conductor.exit_code == 0, cluster.logs()
        cluster.cluster.restart("conductor-0")

        def all_there() -> bool:
            try:
                return len(cluster.live()) == 3
            except httpx.HTTPError:
                return False

        cluster.until(all_there)
        found = cluster.complete(prompt=list(range(200)), max_tokens=4)
        assert found["usage"]["completion_tokens"] == 4
        for process in cluster.cluster.processes.values():
            process.signal(signal.SIGTERM)
            assert process.wait(60)
            assert process.exit_code == 0, cluster.logs()
