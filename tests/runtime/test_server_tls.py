"""A service's certificate: what is wrong with its files, and what it serves by them."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from halfmoon_metadata.tls_trust import trust_context
from halfmoon_runtime import healthcheck
from halfmoon_runtime.observability import operator_http
from halfmoon_runtime.observability.operator_http import OperatorHttp
from halfmoon_runtime.server_tls import BadTlsFiles, date_problem, server_context
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_testing.tls_authority import IssuedCertificate, TlsAuthority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TlsAuthority:
    return TlsAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def issued(authority: TlsAuthority) -> IssuedCertificate:
    return authority.issue()


@pytest.mark.parametrize("which", ["tls_cert", "tls_key"])
def test_a_bad_file_is_named_with_its_setting_and_the_reason(
    issued: IssuedCertificate, tmp_path: Path, which: str
) -> None:
    bad = tmp_path / "bad.pem"
    files = {"tls_cert": str(issued.cert), "tls_key": str(issued.key), which: str(bad)}

    def refuse(reason: str) -> None:
        with pytest.raises(BadTlsFiles, match=f"{which} '.*bad.pem' .*{reason}"):
            server_context(files["tls_cert"], files["tls_key"])

    refuse("can't be read: No such file")
    for content in (b"", b"\xff\xfe"):
        bad.write_bytes(content)
        refuse("no PEM file")
    bad.write_bytes(b"-----BEGIN NONSENSE-----\n-----END NONSENSE-----\n")
    refuse("can't be used")
    bad.unlink()
    bad.mkdir()
    refuse("can't be read: Is a directory")


def test_another_certificates_key_fails(authority: TlsAuthority, issued: IssuedCertificate) -> None:
    other = authority.issue(name="other")
    with pytest.raises(BadTlsFiles, match=r"tls_key '.*other.key' is not the key of .*server.pem"):
        server_context(str(issued.cert), str(other.key))


def test_a_key_with_a_passphrase_is_refused_and_nothing_is_asked(
    issued: IssuedCertificate, tmp_path: Path
) -> None:
    key = load_pem_private_key(issued.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    )
    with pytest.raises(BadTlsFiles, match="has a passphrase"):
        server_context(str(issued.cert), str(locked))


@pytest.mark.parametrize(("days", "problem"), [(1, None), (-1, "expired")])
def test_an_expired_one_is_told(authority: TlsAuthority, days: int, problem: str | None) -> None:
    issued = authority.issue(name=f"days{days}", valid_for=timedelta(days=days))
    found = date_problem(str(issued.cert), server_context(str(issued.cert), str(issued.key)))
    assert (problem in found) if problem and found else found is problem


def test_neither_certificate_nor_key_is_taken_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for given, missing in (("tls-cert", "TLS_KEY"), ("tls-key", "TLS_CERT")):
        with pytest.raises(SystemExit):
            ServiceSettings.from_args([f"--{given}", "x.pem"])
        said = capsys.readouterr().err
        assert f"--{given}" in said
        assert f"(HALFMOON_{missing}) is not" in said


@pytest.fixture
def operators(issued: IssuedCertificate) -> Iterator[OperatorHttp]:
    """Serves operators by TLS, with an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = server_context(str(issued.cert), str(issued.key))
    http = OperatorHttp(loop, lambda: True, tls=context)
    http.start(0, "127.0.0.1")
    yield http
    http.stop()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_operators_are_served_by_tls_alone(
    operators: OperatorHttp, authority: TlsAuthority
) -> None:
    url = operators.url("127.0.0.1")
    assert url.startswith("https://")
    trust = trust_context(str(authority.path))
    for path in ("/metrics", "/health", "/ready"):
        assert httpx.get(url + path, verify=trust).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url.replace('https', 'http')}/health")


def test_handshakes_of_operators_are_bounded_in_time_and_number(
    operators: OperatorHttp, authority: TlsAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator_http, "_CALLER_S", 1.0)
    url = httpx.URL(operators.url("127.0.0.1"))
    assert url.port is not None
    address = ("127.0.0.1", url.port)
    n_most = operator_http._MAX_CONNECTIONS
    silent = [socket.create_connection(address) for _ in range(n_most)]
    silent[0].sendall(b"\x16\x03\x01\x02")  # half of a record
    with socket.create_connection(address) as one_more:
        assert hangs_up(one_more)
    assert all(hangs_up(each) for each in silent)
    for each in silent:
        each.close()
    trust = trust_context(str(authority.path))

    def serves() -> bool:
        try:
            return httpx.get(f"{url}/health", verify=trust).status_code == 200
        except httpx.HTTPError:
            return False

    assert any(serves() for _ in range(100))


def hangs_up(connection: socket.socket) -> bool:
    """Wait for the server's end of a connection."""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1000):
            pass
    return True


def test_the_health_check_asks_by_tls_whatever_the_certificate_names(
    operators: OperatorHttp, tmp_path: Path
) -> None:
    status = tmp_path / "status.json"
    url = operators.url("127.0.0.1")
    status.write_text(f'{{"stage": "ready", "operators": "{url}"}}')
    environment = {healthcheck.STATUS_FILE: str(status)}
    assert healthcheck.find_problem(environment) is None
    # The URL of an image's check is in the clear, whatever the settings are.
    in_the_clear = url.replace("https", "http")
    assert healthcheck.find_problem(environment, f"{in_the_clear}/ready") is None
    assert "404" in str(healthcheck.find_problem(environment, f"{in_the_clear}/nothing"))
