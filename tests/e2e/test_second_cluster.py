"""A second cluster at one metadata server: refused in one line, and the first one goes on.

The server is the product's own over HTTP, without a token, as Redis and etcd have none either.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon_metadata import MemoryStore, open_store
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.membership import GENERATIONS
from tests.e2e.conftest import LiveCluster, StartCluster
from tests.metadata.conftest import HttpServer
from tests.programs import run_program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FAKE = "fake://tiny?step_s=0.001"
FIRST = "the moon is made of green cheese"
SECOND = "the moon is made of blue cheese"


@pytest.fixture(scope="module")
def first(start_cluster: StartCluster) -> Iterator[LiveCluster]:
    server = HttpServer(MemoryStore())
    url = f"http://127.0.0.1:{server.port}/metadata"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFMOON_CLUSTER_KEY", FIRST)
        with start_cluster(FAKE, metadata=url) as cluster:
            yield cluster
    server.stop()


@pytest.fixture
def cluster(first: LiveCluster) -> Iterator[LiveCluster]:
    """It goes on as if there was no other, and its members are counted once."""
    prompt = list(range(1, 200))
    first.until(lambda: first.ask(prompt, 2)[1] > 0)
    counted = starts(first)
    yield first
    assert not first.cluster.dead()
    assert set(first.workers()) == {"prefill-0", "decode-0", "kvstore-0"}
    assert starts(first) == counted
    assert first.ask(prompt, 2)[1] > 0


def starts(cluster: LiveCluster) -> dict[str, bytes]:
    return open_store(cluster.metadata_url).list(GENERATIONS)


@pytest.mark.parametrize(
    ("key", "begins", "reason"),
    [
        pytest.param(SECOND, "halfmoon:", "another cluster", id="another key"),
        pytest.param(FIRST, "halfmoon: worker ", "is in service already", id="the same key"),
    ],
)
def test_a_second_cluster_at_the_server_is_refused_and_the_first_one_loses_nothing(
    cluster: LiveCluster, tmp_path: Path, key: str, begins: str, reason: str
) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "HALFMOON_CLUSTER_KEY_FILE"}
    own = {"COLUMNS": "300", "MODEL": FAKE, "PORT": str(free_port()), "HALFMOON_CLUSTER_KEY": key}
    ended = run_program(
        *("halfmoon_cli", "up", "--metadata", cluster.metadata_url),
        joined=True, timeout_s=300, env={**variables, **own}, cwd=tmp_path,
    )  # fmt: skip
    lines = ended.stdout.strip().splitlines()
    assert ended.returncode == 2 or (key == FIRST and ended.returncode), lines
    assert len(lines) == 1 or key == FIRST, lines
    assert lines[-1].startswith(begins) and reason in lines[-1] and "--cluster NAME" in lines[-1]
    assert "Traceback" not in ended.stdout
