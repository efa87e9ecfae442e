"""Prometheus finds a cluster whose ports are free ones, by the conductor's list of targets."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_sandbox.bound_process import start_bound
from tests.e2e.conftest import LiveCluster, StartCluster
from tests.installed_programs import needs_programs

pytestmark = pytest.mark.e2e

KEY = "a cluster key for prometheus"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
#: Job and worker of each target of the cluster, in the list's order.
EXPECTED = [
    ("conductor", "conductor-0"),
    ("conductor", "conductor-0"),
    ("decode", "decode-0"),
    ("decode", "decode-1"),
    ("kvstore", "kvstore-0"),
    ("prefill", "prefill-0"),
]


class Prometheus:
    """A Prometheus with the configuration of docs/metrics.md."""

    def __init__(self, folder: Path, conductor: str) -> None:
        found = re.search(r"<<'EOF'\n(global:.*?)^EOF\nprometheus (.*?)$", PAGE, re.M | re.S)
        assert found is not None
        config, flags = found.groups()
        config = config.replace("http://127.0.0.1:8000", conductor)
        (folder / "prometheus.yml").write_text(
            config.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("10s", "1s")
        )
        (folder / "operator-token").write_text(operator_token(KEY) + "\n")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self._process = start_bound(
                ["prometheus", *flags.replace(":9090", f":{port}").split()],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.url}/{path}", params=query, timeout=30).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]

    def targets(self) -> list[dict[str, Any]]:
        try:
            found = self.get("targets", state="active")["activeTargets"]
        except (httpx.HTTPError, ValueError):  # it is starting
            return []
        return list(found)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            log = self._output.read_text()
            assert self._process.poll() is None and time.monotonic() < deadline, log
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)


@pytest.fixture
def live(start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveCluster]:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
    with start_cluster("fake://tiny", n_decode=2) as live:
        live.complete(prompt=[1, 2, 3], max_tokens=2)
        yield live


@pytest.fixture
def prometheus(tmp_path: Path, live: LiveCluster) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, live.url)
    yield server
    server.stop()


@needs_programs("prometheus")
def test_a_prometheus_set_up_as_the_page_says_scrapes_all_of_them(
    live: LiveCluster, prometheus: Prometheus
) -> None:
    def all_up() -> bool:
        found = prometheus.targets()
        up = [(t["labels"]["job"], t["labels"]["worker"]) for t in found if t["health"] == "up"]
        return sorted(up) == EXPECTED and len(found) == len(EXPECTED)

    prometheus.until(all_up)
    # A metric's own labels are not hidden by those of its target.
    (workers,) = prometheus.get("query", query='halfmoon_workers{role="decode"}')["result"]
    assert workers["metric"]["job"] == "conductor"
    assert workers["value"][1] == "2"
    assert workers["metric"]["model"] == live.model

    # It takes what the dashboard asks, and has a value for each of its variables.
    board = json.loads((ROOT / "deploy/grafana/dashboards/halfmoon.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = re.sub(r"\$(model|role|worker|tenant)", ".*", target["expr"])
            prometheus.get("query", query=query.replace("$__rate_interval", "1m"))
    found: dict[str, Any] = {}
    for variable in board["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert asked is not None
        series = re.sub(r"\$\w+", ".*", asked[1])
        found[variable["name"]] = prometheus.get(f"label/{asked[2]}/values", **{"match[]": series})
    assert found == {
        "model": [live.model],
        "role": sorted({job for job, _ in EXPECTED}),
        "worker": sorted({worker for _, worker in EXPECTED}),
        "tenant": [],
    }

    # It follows a worker that leaves.
    live.process("decode-1").signal(signal.SIGTERM)
    prometheus.until(lambda: len(prometheus.targets()) == len(EXPECTED) - 1)
    assert "decode-1" not in [each["labels"]["worker"] for each in prometheus.targets()]
