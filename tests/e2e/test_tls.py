"""Clusters whose HTTP is TLS alone: REST, embedded metadata, operators' ports, commands."""

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app as halfmoon
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_testing.tls_authority import TlsAuthority
from tests.e2e.conftest import StartCluster

pytestmark = pytest.mark.e2e

KEY = "only good for a test of TLS"
PROMPT = list(range(100))


def test_a_cluster_by_tls_answers_as_one_in_the_clear_and_only_to_those_who_trust_its_ca(
    start_cluster: StartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
    authority = TlsAuthority(tmp_path)
    issued, ca = authority.issue(), str(authority.path)
    files = {"tls_cert": str(issued.cert), "tls_key": str(issued.key), "tls_ca": ca}
    expected = FakeEngine(block_size=64).expected(PROMPT, 8)
    with start_cluster("fake://tiny", **files) as cluster:
        assert cluster.url.startswith("https://")
        assert cluster.ask(PROMPT, 8)[0] == cluster.stream(PROMPT, 8) == expected

        # Without the CA, and in the clear, nothing is served on any port.
        operators = [p.status["operators"] for p in cluster.cluster.processes.values()]
        assert len(operators) == 4
        for url in (cluster.url, *operators):
            assert url.startswith("https://")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"{url}/health")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url.replace('https', 'http')}/health")
            trust = trust_context(ca)
            assert httpx.get(f"{url}/health", verify=trust).status_code == 200

        # The commands reach it with the CA, and name the setting without.
        monkeypatch.setenv("HALFMOON_URL", cluster.url)
        metadata = ["--metadata", cluster.cluster.plan.metadata_url]
        commands = (["status"], ["roles"], ["chat", "hi", "--max-tokens", "4"])
        for command in commands:
            shown = CliRunner().invoke(halfmoon, [*command, "--tls-ca", ca])
            assert shown.exit_code == 0, shown.output
        for command in (*commands, ["kv", "ls", *metadata]):
            shown = CliRunner().invoke(halfmoon, command)
            assert shown.exit_code != 0, shown.output
            assert "HALFMOON_TLS_CA" in shown.output
        monkeypatch.setenv("HALFMOON_TLS_CA", ca)
        shown = CliRunner().invoke(halfmoon, ["kv", "ls", *metadata])
        assert shown.exit_code == 0, shown.output
        load = ["--requests", "3", "--rate", "20", "--input-tokens", "32", "--output-tokens", "4"]
        shown = CliRunner().invoke(halfmoon, ["bench", *load, "--json", str(tmp_path / "b.json")])
        assert shown.exit_code == 0, shown.output
        summary = json.loads((tmp_path / "b.json").read_text())["runs"][0]["summary"]
        assert summary["n_finished"] == 3, summary
