"""A conductor that is started again, and the order in which a cluster is stopped."""

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import LiveCluster

pytestmark = pytest.mark.e2e

FAKE = "fake://restart?max_context=2048"
StartCluster = Callable[..., Any]


@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_workers_need_no_restart_when_the_embedded_metadata_server_starts_again(
    start_cluster: StartCluster, ends_by: signal.Signals
) -> None:
    """As docs/operating.md says; then all are stopped, the conductor first, as it advises."""
    with start_cluster(FAKE) as cluster:
        cluster.complete(prompt=list(range(200)), max_tokens=4)
        cluster.until(lambda: n_indexed(cluster) > 2)
        conductor = cluster.process("conductor-0")
        conductor.signal(ends_by)
        assert conductor.wait(60)
        assert conductor.exit_code == (0 if ends_by is signal.SIGTERM else -ends_by)
        cluster.cluster.restart("conductor-0")

        def all_there() -> bool:
            try:
                return len(cluster.live()) == 3
            except httpx.HTTPError:
                return False

        cluster.until(all_there)
        cluster.until(lambda: n_indexed(cluster) > 2)  # the kvstore has told what it holds
        found = cluster.complete(prompt=list(range(200)), max_tokens=4)["usage"]
        assert found["completion_tokens"] == 4
        assert found["prompt_tokens_details"]["cached_tokens"] > 100
        for process in cluster.cluster.processes.values():
            process.signal(signal.SIGTERM)
            assert process.wait(60)
            assert process.exit_code == 0, cluster.logs()


def n_indexed(cluster: LiveCluster) -> float:
    """Blocks that the conductor knows of."""
    try:
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    except httpx.HTTPError:
        return 0.0
    (line,) = [each for each in metrics.splitlines() if each.startswith("halfmoon_index_blocks ")]
    return float(line.split()[1])
