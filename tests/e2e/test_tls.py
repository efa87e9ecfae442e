"""Clusters whose HTTP is TLS alone: REST, embedded metadata, operators' ports, commands."""

import json
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app as halfmoon
from halfmoon_engine.fake_engine import FakeEngine
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_testing.tls_authority import TlsAuthority
from tests.e2e.conftest import StartCluster
from tests.programs import run_program

pytestmark = pytest.mark.e2e

KEY = "only good for a test of TLS"
PROMPT = list(range(100))


@pytest.fixture
def authority(tmp_path: Path) -> TlsAuthority:
    return TlsAuthority(tmp_path)


def test_a_cluster_by_tls_answers_as_one_in_the_clear_and_only_to_those_who_trust_its_ca(
    start_cluster: StartCluster,
    authority: TlsAuthority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
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


def test_what_can_not_be_served_by_tls_ends_and_says_why_in_one_line(
    authority: TlsAuthority, tmp_path: Path
) -> None:
    issued, other = authority.issue(), authority.issue(name="other")
    model, port = ("--model", "fake://tiny"), str(free_port())
    up = ("halfmoon_cli", "up", *model, "--port", port, "--state", str(tmp_path / "up"))
    conductor = ("halfmoon_conductor", *model, "--http-port", port)
    for command, cert, key, status, reason in (
        (up, issued.cert, issued.key, 1, "HALFMOON_TLS_CA"),
        (conductor, tmp_path / "missing.pem", issued.key, 2, "No such file"),
        (conductor, issued.cert, other.key, 2, "is not the key of"),
    ):
        files = ("--tls-cert", str(cert), "--tls-key", str(key))
        ended = run_program(*command, *files, joined=True)
        assert ended.returncode == status, ended.stdout
        assert reason in ended.stdout and "Traceback" not in ended.stdout


def test_an_expired_certificate_is_served_with_a_warning(
    start_cluster: StartCluster, authority: TlsAuthority
) -> None:
    issued = authority.issue(name="old", valid_for=timedelta(days=-1))
    files = [f"--tls-cert={issued.cert}", f"--tls-key={issued.key}"]
    with start_cluster("fake://tiny", n_kvstore=1, extra={"kvstore": files}) as cluster:
        assert cluster.ask(PROMPT, 8)
        log = cluster.process("kvstore-0").log_path.read_text()
        assert "it has expired" in log
        assert str(issued.cert) in log
