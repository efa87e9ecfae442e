"""Clusters whose HTTP is TLS alone: REST, embedded metadata, operators' ports, commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app as halfmoon
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_metadata.tls_trust import trust_context
from halfmoon_testing.tls_authority import IssuedCertificate, TlsAuthority

pytestmark = pytest.mark.e2e

StartCluster = Callable[..., Any]
KEY = "only good for a test of TLS"
ASK = {"prompt": list(range(100)), "max_tokens": 8, "temperature": 0}


@pytest.fixture
def authority(tmp_path: Path) -> TlsAuthority:
    return TlsAuthority(tmp_path)


@pytest.fixture
def files(authority: TlsAuthority) -> dict[str, str]:
    issued = authority.issue()
    return {
        "tls_cert": str(issued.cert),
        "tls_key": str(issued.key),
        "tls_ca": str(authority.path),
    }


def test_a_cluster_by_tls_answers_as_one_in_the_clear_and_only_to_those_who_trust_its_ca(
    start_cluster: StartCluster,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start_cluster("fake://tiny") as cluster:
        expected = cluster.complete(**ASK)["choices"]
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", KEY)
    with start_cluster("fake://tiny", **files) as cluster:
        assert cluster.url.startswith("https://")
        assert cluster.complete(**ASK)["choices"] == expected
        streamed = cluster.post("/v1/completions", model=cluster.model, stream=True, **ASK)
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == expected[0]["text"]

        # Without the CA, and in the clear, nothing is served on any port.
        operators = [p.status["operators"] for p in cluster.cluster.processes.values()]
        assert len(operators) == 4
        for url in (cluster.url, *operators):
            assert url.startswith("https://")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"{url}/health")
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url.replace('https', 'http')}/health")
            trust = trust_context(files["tls_ca"])
            assert httpx.get(f"{url}/health", verify=trust).status_code == 200

        # The commands reach it with the CA, and name the setting without.
        monkeypatch.setenv("HALFMOON_URL", cluster.url)
        metadata = ["--metadata", cluster.cluster.plan.metadata_url]
        commands = (["status"], ["roles"], ["chat", "hi", "--max-tokens", "4"])
        for command in commands:
            shown = CliRunner().invoke(halfmoon, [*command, "--tls-ca", files["tls_ca"]])
            assert shown.exit_code == 0, shown.output
        for command in (*commands, ["kv", "ls", *metadata]):
            shown = CliRunner().invoke(halfmoon, command)
            assert shown.exit_code != 0, shown.output
            assert "HALFMOON_TLS_CA" in shown.output
        monkeypatch.setenv("HALFMOON_TLS_CA", files["tls_ca"])
        shown = CliRunner().invoke(halfmoon, ["kv", "ls", *metadata])
        assert shown.exit_code == 0, shown.output
        load = ["--requests", "3", "--rate", "20", "--input-tokens", "32", "--output-tokens", "4"]
        shown = CliRunner().invoke(halfmoon, ["bench", *load, "--json", str(tmp_path / "b.json")])
        assert shown.exit_code == 0, shown.output
        summary = json.loads((tmp_path / "b.json").read_text())["runs"][0]["summary"]
        assert summary["n_finished"] == 3, summary


def test_up_without_the_ca_of_its_certificate_ends_and_names_the_setting(
    files: dict[str, str], tmp_path: Path
) -> None:
    up = [sys.executable, "-m", "halfmoon_cli", "up", "--model", "fake://tiny"]
    flags = ["--tls-cert", files["tls_cert"], "--tls-key", files["tls_key"]]
    ended = subprocess.run(
        [*up, *flags, "--port", str(free_port()), "--state", str(tmp_path / "up")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    assert "HALFMOON_TLS_CA" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def conductor(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a conductor that shall refuse to start."""
    command = [sys.executable, "-m", "halfmoon_conductor", "--model", "fake://tiny"]
    return subprocess.run(
        [*command, "--http-port", str(free_port()), *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_service_with_bad_files_does_not_start_and_says_why_in_one_line(
    authority: TlsAuthority, tmp_path: Path
) -> None:
    issued, other = authority.issue(), authority.issue(name="other")
    missing = IssuedCertificate(tmp_path / "missing.pem", issued.key)
    crossed = IssuedCertificate(issued.cert, other.key)
    for files, reason in ((missing, "No such file"), (crossed, "is not the key of")):
        ended = conductor("--tls-cert", str(files.cert), "--tls-key", str(files.key))
        assert ended.returncode == 2
        said = ended.stdout + ended.stderr
        assert reason in said
        assert "Traceback" not in said


def test_an_expired_certificate_is_served_with_a_warning(
    start_cluster: StartCluster, authority: TlsAuthority
) -> None:
    issued = authority.issue(name="old", valid_for=timedelta(days=-1))
    files = [f"--tls-cert={issued.cert}", f"--tls-key={issued.key}"]
    with start_cluster("fake://tiny", n_kvstore=1, extra={"kvstore": files}) as cluster:
        assert cluster.complete(**ASK)
        log = cluster.process("kvstore-0").log_path.read_text()
        assert "it has expired" in log
        assert str(issued.cert) in log
