"""A cluster whose metadata server is a real Redis, which outlives a conductor."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import LiveCluster, StartCluster
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


@pytest.fixture
def second_conductor(
    start_cluster: StartCluster, redis: RedisServer
) -> Iterator[tuple[LiveCluster, str]]:
    """A cluster at the Redis, and the URL of another conductor there, with the same workers."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with start_cluster("fake://tiny", metadata=redis.url) as cluster:
        flags = ("--metadata", redis.url, "--http-port", str(port), "--model", "fake://tiny")
        spec = ProcessSpec("conductor-1", "conductor", (*flags, "--worker-id", "conductor-1"))
        process = ServiceProcess(spec, cluster.cluster.folder)

        def is_ready() -> bool:
            assert process.exit_code is None, process.last_lines()
            try:
                return httpx.get(f"{url}/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            cluster.until(is_ready)
            yield cluster, url
        finally:
            process.signal(signal.SIGKILL)
            process.wait(20)


def test_a_conductor_goes_on_from_a_response_that_another_one_stored(
    second_conductor: tuple[LiveCluster, str],
) -> None:
    cluster, other = second_conductor
    ours = f"{cluster.url}/v1/responses"
    theirs = f"{other}/v1/responses"
    body = {"model": cluster.model, "input": "Hi", "max_output_tokens": 4}

    def answered(at: str, **fields: Any) -> dict[str, Any]:
        answer = httpx.post(at, json={**body, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    first = answered(ours)
    second = answered(theirs, input="Sure?", previous_response_id=first["id"])
    whole = answered(
        ours,
        input=[
            {"role": "user", "content": "Hi"},
            *first["output"],
            {"role": "user", "content": "Sure?"},
        ],
    )
    alone = answered(theirs, input="Sure?")
    n_tokens = [each["usage"]["input_tokens"] for each in (second, whole, alone)]
    assert n_tokens[0] == n_tokens[1] > n_tokens[2]
    assert httpx.get(f"{theirs}/{first['id']}", timeout=10).json() == first
    # Both ways, and removed for all.
    answered(ours, input="Sure?", previous_response_id=second["id"])
    assert httpx.delete(f"{theirs}/{first['id']}", timeout=10).status_code == 200
    assert httpx.get(f"{ours}/{first['id']}", timeout=10).status_code == 404


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
