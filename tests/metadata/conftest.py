"""The stores that the conformance suite runs on, each with what it needs: a server, a clock."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
import uvicorn

from halfmoon_metadata import MemoryStore, MetadataStore, open_store
from halfmoon_metadata.http_server import metadata_app
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.clock import FakeClock
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.processes.etcd_server import EtcdServer
from halfmoon_testing.tls_authority import IssuedCertificate, TlsAuthority
from tests.installed_programs import skip_without

#: Password of the servers that want one.
PASSWORD = "s3cr3t"


def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class HttpServer:
    """`metadata_app` in a real server, in a thread."""

    def __init__(
        self,
        store: MetadataStore,
        port: int = 0,
        *,
        tokens: Sequence[str] = (),
        tls: IssuedCertificate | None = None,
    ) -> None:
        #: What is served; may be exchanged at any time.
        self.store = store
        self._tokens = tokens
        # Saying TCP lets asyncio turn Nagle's algorithm off, which costs 40 ms per answer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        self.port: int = listener.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                log_config=None,
                lifespan="off",
                ssl_certfile=None if tls is None else tls.cert,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        until(lambda: self._server.started)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await metadata_app(self.store, tokens=self._tokens)(scope, receive, send)

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()


class RedisServer:
    """A Redis without persistence."""

    def __init__(self, *, password: str = "", tls: IssuedCertificate | None = None) -> None:
        self.port = free_port()
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
        if tls is None:
            options += ["--port", str(self.port)]
        else:
            options += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            options += ["--tls-cert-file", str(tls.cert), "--tls-key-file", str(tls.key)]
        if password:
            options += ["--requirepass", password]
        self._process = start_bound(["redis-server", *options], stdout=subprocess.DEVNULL)
        #: A client that needs no certificate, for the test's own acts.
        self.client = client = redis.Redis(
            port=self.port, password=password or None, ssl=tls is not None, ssl_cert_reqs="none"
        )

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        until(answers)

        login = f":{password}@" if password else ""
        self.url = f"redis{'s' if tls else ''}://{login}127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait()


@dataclass
class Subject:
    """A store under test."""

    kind: str
    #: A client of its own, of the same records.
    another: Callable[[], MetadataStore]
    #: Lets so many seconds pass, by the store's clock.
    sleep: Callable[[float], None]
    store: MetadataStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = self.another()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TlsAuthority:
    return TlsAuthority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def certificate(authority: TlsAuthority) -> IssuedCertificate:
    return authority.issue("127.0.0.1", "localhost")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    skip_without("redis-server")
    server = RedisServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    skip_without("etcd")
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_http_server() -> Iterator[HttpServer]:
    server = HttpServer(MemoryStore())
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls_http_server(certificate: IssuedCertificate) -> Iterator[HttpServer]:
    server = HttpServer(MemoryStore(), tls=certificate)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls_redis_server(certificate: IssuedCertificate) -> Iterator[RedisServer]:
    skip_without("redis-server")
    server = RedisServer(password=PASSWORD, tls=certificate)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls_etcd_server(certificate: IssuedCertificate) -> Iterator[EtcdServer]:
    skip_without("etcd")
    with EtcdServer(tls=certificate, root_password=PASSWORD) as server:
        yield server


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    server = HttpServer(MemoryStore())
    yield server
    server.stop()


@pytest.fixture(params=["memory", "http", "https", "redis", "rediss", "etcd", "etcds"])
def subject(request: pytest.FixtureRequest, authority: TlsAuthority) -> Iterator[Subject]:
    kind: str = request.param
    server: Any = None
    if kind != "memory":
        plain = {"http": "shared_http_server", "redis": "redis_server", "etcd": "etcd_server"}
        names = plain | {f"{name}s": f"tls_{name}_server" for name in plain}
        server = request.getfixturevalue(names[kind])
    opened: list[MetadataStore] = []

    def opener(url: str) -> Callable[[], MetadataStore]:
        def another() -> MetadataStore:
            opened.append(open_store(url, tls_ca=str(authority.path)))
            return opened[-1]

        return another

    # Clocks of ours run when a test says so, so expiry needs no waiting there.
    clock = FakeClock()
    memory = MemoryStore(clock.now)
    if kind == "memory":
        yield Subject(kind, lambda: memory, clock.advance)
    elif kind.startswith("http"):
        server.store = memory
        url = f"{kind}://127.0.0.1:{server.port}/metadata"
        yield Subject(kind, opener(url), clock.advance)
    elif kind.startswith("etcd"):
        server.clear()
        yield Subject(kind, opener(server.url), time.sleep)
    else:
        server.client.flushall()
        yield Subject(kind, opener(server.url), time.sleep)
    memory.check()
    for store in opened:
        store.close()
