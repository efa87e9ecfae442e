"""A conductor that is killed in mid-stream: its clients go on at another one, or at the next."""

import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from halfmoon_cli.up.embedded_cluster import ProcessSpec, ServiceProcess
from halfmoon_metadata.tcp_ports import free_port
from tests.e2e.conftest import StartCluster

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
}


class Event(NamedTuple):
    id: str
    tokens: list[int]


class Pair:
    """A cluster whose own conductor stays, and a second conductor, which is killed."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.staying: str = cluster.url
        self.model: str = cluster.model
        self._port = free_port()
        self.dying = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        plan = self.cluster.cluster.plan
        flags = ("--metadata", self.cluster.metadata_url, "--http-port", str(self._port))
        spec = ProcessSpec(
            "conductor-1",
            "conductor",
            (*flags, "--model", plan.model, "--worker-id", "conductor-1", "--drain-s", "0"),
        )
        self._process = ServiceProcess(spec, self.cluster.cluster.folder)
        self.cluster.until(self._is_ready)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the conductor, unless it has ended."""
        self._process.signal(number)
        self._process.wait(20)

    def _is_ready(self) -> bool:
        assert self._process.exit_code is None, self._process.last_lines()
        try:
            return httpx.get(f"{self.dying}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def events(self, url: str, key: str, last: str = "", **body: Any) -> list[Event]:
        """Read a stream to its end, or to where its connection breaks."""
        events: list[Event] = []
        headers = {"idempotency-key": key, **({"last-event-id": last} if last else {})}
        request = {"model": self.model, **BODY, **body}
        with (
            suppress(httpx.TransportError),
            httpx.stream(
                "POST", f"{url}/v1/completions", json=request, headers=headers, timeout=60
            ) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            event_id = ""
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and value == "[DONE]":
                    events.append(Event(event_id, []))
                elif name == "data":
                    data = json.loads(value)
                    assert "error" not in data, data
                    events.append(Event(event_id, data["choices"][0]["token_ids"]))
        return events


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


@pytest.fixture(scope="module")
def pair(start_cluster: StartCluster, tiny_model: Path) -> Iterator[Pair]:
    both = ["--dtype", "float32", "--block-size", "16"]
    extra = {"prefill": both, "decode": both}
    with start_cluster(str(tiny_model), extra=extra) as cluster:
        pair = Pair(cluster)
        yield pair
        pair.kill()


def client_of_the_page() -> Callable[[str, dict[str, Any]], Iterator[str]]:
    """Return the function of docs/api.md that reads a stream and goes on by itself."""
    code = re.search(r"```python\n(import time\nimport uuid.*?)```", PAGE.read_text(), re.S)
    assert code
    names: dict[str, Any] = {}
    exec(code[1], names)
    events: Callable[[str, dict[str, Any]], Iterator[str]] = names["events"]
    return events


def tokens_of(*parts: list[Event]) -> list[int]:
    return [token for part in parts for event in part for token in event.tokens]


def test_the_client_of_the_page_goes_on_by_one_address_at_the_conductor_that_is_alive(
    pair: Pair, alone: Any
) -> None:
    body = {"model": pair.model, **BODY, "temperature": 0}
    tokens: list[int] = []
    with closing(Relay(pair.dying, pair.staying, n=5, do=pair.kill)) as relay:
        for event in client_of_the_page()(f"{relay.url}/v1/completions", body):
            if event != "[DONE]":
                tokens += json.loads(event)["choices"][0]["token_ids"]
        assert relay.taken == [pair.dying, pair.staying]
    assert tokens == alone.generate(PROMPT, N_NEW)
    pair.start()


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_sampled_tokens_go_on_at_another_conductor_without_a_seed_of_the_client(
    pair: Pair, by: signal.Signals
) -> None:
    with closing(Relay(pair.dying, n=20, do=partial(pair.kill, by))) as relay:
        first = pair.events(relay.url, by.name, temperature=1)
    assert len(first) == 20
    rest = pair.events(pair.staying, by.name, first[-1].id, temperature=1)
    pair.start()
    # The conductor that was started again has kept nothing: it computes all anew.
    whole = pair.events(pair.dying, by.name, temperature=1)
    assert len(tokens_of(whole)) == N_NEW
    assert tokens_of(first, rest) == tokens_of(whole)
    assert [event.id for event in first + rest] == [event.id for event in whole]
    other = pair.events(pair.staying, "another", temperature=1)
    assert tokens_of(other) != tokens_of(whole)
