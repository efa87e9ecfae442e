"""Stores over TLS: which servers they trust, and what they say of one that they do not."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from halfmoon_metadata import MemoryStore, MetadataError, MetadataRefused, open_store
from halfmoon_testing.processes.etcd_server import EtcdServer
from halfmoon_testing.tls_authority import IssuedCertificate, TlsAuthority
from tests.installed_programs import skip_without
from tests.metadata.conftest import PASSWORD, HttpServer, RedisServer

#: Starts a server of a kind with a certificate, and returns its URL.
Start = Callable[[str, IssuedCertificate], str]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_it(kind: str, certificate: IssuedCertificate) -> str:
            if kind == "https":
                http = HttpServer(MemoryStore(), tls=certificate)
                stack.callback(http.stop)
                return f"https://127.0.0.1:{http.port}/metadata"
            if kind == "etcds":
                skip_without("etcd")
                return stack.enter_context(EtcdServer(tls=certificate)).url
            skip_without("redis-server")
            redis = RedisServer(tls=certificate)
            stack.callback(redis.stop)
            return redis.url

        yield start_it


KINDS = pytest.mark.parametrize("kind", ["https", "rediss", "etcds"])


@pytest.fixture(params=["https", "rediss", "etcds"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a server with a certificate, which knows a password."""
    if request.param == "https":
        http: HttpServer = request.getfixturevalue("tls_http_server")
        return f"https://u:{PASSWORD}@127.0.0.1:{http.port}/metadata"
    name = "tls_redis_server" if request.param == "rediss" else "tls_etcd_server"
    found: str = request.getfixturevalue(name).url
    return found


def test_a_server_of_an_unknown_ca_is_refused_and_the_setting_is_named(
    url: str, tmp_path: Path
) -> None:
    for tls_ca in ("", str(TlsAuthority(tmp_path, "other").path)):
        store = open_store(url, tls_ca=tls_ca)
        told = r"127.0.0.1.*not accepted.*HALFMOON_TLS_CA"
        with pytest.raises(MetadataRefused, match=told) as no:
            store.put("k", b"1")
        assert PASSWORD not in str(no.value)
        store.close()


@KINDS
@pytest.mark.parametrize(
    ("host", "days", "reason"),
    [("elsewhere.example", 1, "the URL must have a name"), ("127.0.0.1", -1, "expired.*new one")],
)
def test_a_certificate_for_another_host_or_an_expired_one_is_refused(
    start: Start, authority: TlsAuthority, kind: str, host: str, days: int, reason: str
) -> None:
    issued = authority.issue(host, name=f"{kind}-{days}", valid_for=timedelta(days=days))
    store = open_store(start(kind, issued), tls_ca=str(authority.path))
    with pytest.raises(MetadataRefused, match=reason):
        store.get("k")
    store.close()


def test_a_client_without_tls_gets_nothing_from_a_server_with_it(url: str) -> None:
    store = open_store(url.replace("s://", "://", 1))
    # Go's servers say in plain HTTP that they want TLS, the others close the connection.
    with pytest.raises(MetadataError) as failed:
        store.get("k")
    assert PASSWORD not in str(failed.value)
    store.close()


def test_a_redis_with_another_password_is_refused_without_saying_it(
    tls_redis_server: RedisServer, authority: TlsAuthority
) -> None:
    url = tls_redis_server.url
    for wrong in (url.replace(PASSWORD, "wr0ng"), url.replace(f":{PASSWORD}@", "")):
        store = open_store(wrong, tls_ca=str(authority.path))
        with pytest.raises(MetadataRefused, match=r"rediss://127.0.0.1.*user and password") as no:
            store.get("k")
        assert "wr0ng" not in str(no.value)
        store.close()


@pytest.mark.parametrize("scheme", ["https", "rediss", "etcds"])
@pytest.mark.parametrize(
    ("content", "reason"), [(None, "can't be read"), (b"no PEM", "no cert"), (b"\xff", "no cert")]
)
def test_a_file_of_cas_that_can_not_be_used_is_named(
    tmp_path: Path, scheme: str, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "cas.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"HALFMOON_TLS_CA.*cas.pem.*{reason}"):
        open_store(f"{scheme}://127.0.0.1:1", tls_ca=str(path))
