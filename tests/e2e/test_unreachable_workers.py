"""Workers with an address at which the conductor can't reach them: said at both ends."""

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_decode_workers_with_a_wrong_advertised_host_are_named_by_conductor_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HALFMOON_CLUSTER_KEY", "HALFMOON_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    plan = ClusterPlan(
        model="fake://tiny?step_s=0.001",
        http_port=free_port(),
        n_prefill=1,
        n_decode=2,
        n_kvstore=0,
        # Another loopback address, at which the workers do not listen.
        extra={"decode": ["--advertise-host=127.0.0.2"]},
    )
    with EmbeddedCluster(plan, tmp_path) as cluster:
        live = LiveCluster(cluster)
        live.until(cluster.ready)
        live.until(lambda: len(live.get("/debug/cluster")["unreachable"]) == 2)
        view = live.get("/debug/cluster")
        assert [each["worker_id"] for each in view["workers"]] == ["prefill-0"]
        for each in view["unreachable"]:
            assert each["role"] == "decode"
            assert each["address"].startswith("tcp://127.0.0.2:")
            assert "connection refused" in each["reason"]
            assert "--advertise-host" in each["advice"]

        ready = httpx.get(f"{plan.url}/ready", timeout=10)
        assert (ready.status_code, ready.json()["missing"]) == (503, ["decode"])
        said = ready.json()["reason"]
        assert "decode-0 at tcp://127.0.0.2:" in said and "--advertise-host" in said
        refused = live.post("/v1/completions", model="tiny", prompt=[1, 2], max_tokens=1)
        assert refused.status_code == 503
        assert "decode-1 at tcp://127.0.0.2:" in refused.json()["error"]["message"]
        assert live.metrics(role="decode")["halfmoon_unreachable_workers"] == 2
        shown = CliRunner().invoke(app, ["status", "--url", plan.url], env={"COLUMNS": "400"})
        assert "decode-0 is unreachable at tcp://127.0.0.2:" in shown.output, shown.output
        log = cluster.processes["conductor-0"].log_path
        live.until(lambda: "worker_unreachable" in log.read_text())

        for name in ("decode-0", "decode-1"):
            worker = cluster.processes[name]
            live.until(lambda worker=worker: "problem" in worker.status)
            problem = str(worker.status["problem"])
            assert problem.startswith("conductor-0 can't reach this worker at tcp://127.0.0.2:")
            assert "--advertise-host" in problem
            assert "no_conductor" in worker.log_path.read_text()
            health = httpx.get(f"{worker.status['operators']}/health", timeout=10).json()
            assert health == {"status": "ok", "problem": problem}
        assert "problem" not in cluster.processes["prefill-0"].status
