"""A conductor that is killed in mid-stream: its client goes on at another one."""

import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import LiveCluster, StartCluster

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
N_NEW = 300
PROMPT = [10 + (i * 37) % 300 for i in range(90)]
#: Long answers of which no token ends one, so that all are told of.
BODY = {
    "prompt": PROMPT,
    "max_tokens": N_NEW,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
    "temperature": 0,
}


class Relay:
    """A TCP proxy before several conductors: each connection goes to the first that listens.

    It holds a stream after as many events as it is told, until the conductor is killed: however
    fast an answer comes, the client has that much of it, and no more.
    """

    def __init__(self, *urls: str, n: int, do: Callable[[], None]) -> None:
        self._urls = urls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        #: Where connections went, in their order.
        self.taken: list[str] = []
        #: The first connection breaks after so many events; this is done before.
        self._n, self._do = n, do
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; open ones end with their sockets."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                is_first, far = not self.taken, self._connect()
                answer = partial(_pass_events, self._n, self._do) if is_first else _pass_on
                threading.Thread(target=_pass_on, args=(near, far), daemon=True).start()
                threading.Thread(target=answer, args=(far, near), daemon=True).start()

    def _connect(self) -> socket.socket:
        for url in self._urls:
            address = httpx.URL(url)
            with suppress(ConnectionRefusedError):
                far = socket.create_connection((address.host, address.port))
                self.taken.append(url)
                return far
        raise AssertionError("no conductor listens")


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def _pass_events(
    n: int, do: Callable[[], None], source: socket.socket, sink: socket.socket
) -> None:
    """Pass so many events on, do something, and end the connection."""
    passed = b""
    while passed.count(b"data: ") < n or not passed.endswith(b"\n\n"):
        data = source.recv(1)
        assert data, "the stream ended too early"
        sink.sendall(data)
        passed += data
    do()
    sink.shutdown(socket.SHUT_RDWR)


@contextmanager
def second_conductor(cluster: LiveCluster) -> Iterator[tuple[str, ServiceProcess]]:
    """One more of the same workers: its URL and process."""
    plan, port = cluster.cluster.plan, free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ("--metadata", cluster.metadata_url, "--http-port", str(port), "--model", plan.model)
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
        yield url, process
    finally:
        process.signal(signal.SIGKILL)
        process.wait(20)


def client_of_the_page() -> Callable[[str, dict[str, Any]], Iterator[str]]:
    """Return the function of docs/api.md that reads a stream and goes on by itself."""
    code = re.search(r"```python\n(import time\nimport uuid.*?)```", PAGE.read_text(), re.S)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    events: Callable[[str, dict[str, Any]], Iterator[str]] = names["events"]
    return events


def test_the_client_of_the_page_goes_on_by_one_address_at_the_conductor_that_is_alive(
    start_cluster: StartCluster, tiny_model: Path, alone: Any
) -> None:
    both = ["--dtype", "float32", "--block-size", "16"]
    with (
        start_cluster(str(tiny_model), extra={"prefill": both, "decode": both}) as cluster,
        second_conductor(cluster) as (dying, process),
    ):

        def kill() -> None:
            process.signal(signal.SIGKILL)
            process.wait(20)

        tokens: list[int] = []
        with closing(Relay(dying, cluster.url, n=5, do=kill)) as relay:
            body = {"model": cluster.model, **BODY}
            for event in client_of_the_page()(f"{relay.url}/v1/completions", body):
                if event != "[DONE]":
                    tokens += json.loads(event)["choices"][0]["token_ids"]
            assert relay.taken == [dying, cluster.url]
        assert tokens == alone.generate(PROMPT, N_NEW)
