"""`halfmoon route` before two stock vLLM servers: hits, equal tokens, kill -9, none left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_sandbox.bound_process import start_bound
from tests.vllm.stock_server import (
    StockServer,
    body,
    complete,
    streamed,
    tokens_of,
)

WITHIN_S = 120.0
BLOCK_SIZE = 32


class Route:
    """A running `halfmoon route`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._state = folder / "route"
        self._output = folder / "route.output"
        command = [sys.executable, "-m", "halfmoon_cli", "route", "--port", str(port)]
        with self._output.open("wb") as output:
            self._process = start_bound(
                [*command, "--state", str(self._state), *flags],
                env={**os.environ, "COLUMNS": "300"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until(lambda: "Ctrl-C stops it" in self.text)

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def live(self) -> set[str]:
        """Workers that the conductor uses."""
        workers = self._debug("cluster")["workers"]
        return {worker["worker_id"] for worker in workers if not worker["refused"]}

    def _debug(self, name: str) -> Any:
        token = operator_token((self._state / "cluster-key").read_text().strip())
        shown = {"authorization": f"Bearer {token}"}
        return httpx.get(f"{self.url}/debug/{name}", timeout=10, headers=shown).json()

    def last_server(self) -> int:
        """The server that the newest request was placed at."""
        decisions = self._debug("decisions")["decisions"]
        return int(decisions[-1]["placement"]["decode"].split("-")[1])

    def cached(self, prompt: list[int], **fields: Any) -> int:
        usage = complete(self.url, prompt, 1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert self._process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(60) == 0, self.text


@pytest.fixture(scope="module")
def servers(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[StockServer]]:
    folder = tmp_path_factory.mktemp("stock")
    running = [StockServer(model_of("llama"), folder) for _ in range(2)]
    try:
        for server in running:
            server.wait_until_ready()
        yield running
    finally:
        for server in running:
            server.kill()


@pytest.fixture(scope="module")
def route(servers: list[StockServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    flags = [word for server in servers for word in ("--worker", server.url)]
    running = Route(tmp_path_factory.mktemp("route"), *flags)
    try:
        running.until(lambda: len(running.live()) == 6)
        yield running
    finally:
        running.stop()


def a_prompt(n: int, first: int) -> list[int]:
    return [3 + (first + 7 * i) % 300 for i in range(n)]


def test_the_route_says_what_it_found_and_tokens_are_those_of_a_direct_request(
    route: Route, servers: list[StockServer]
) -> None:
    for server in servers:
        assert f"{server.url}: tiny, vllm 0.32.0, KV events" in route.text
    for n in (5, 40, 200):
        prompt = a_prompt(n, 1)
        assert tokens_of(complete(route.url, prompt, 24)) == tokens_of(
            servers[0].complete(prompt, 24)
        )


def test_a_prefix_goes_to_the_server_that_has_it(route: Route, servers: list[StockServer]) -> None:
    prompt = a_prompt(10 * BLOCK_SIZE, 2)
    complete(route.url, prompt, 1)
    at = route.last_server()
    route.until(lambda: route.cached([*prompt, 5]) == 10 * BLOCK_SIZE)
    assert route.last_server() == at

    # The server's own usage says so too, and the other server has nothing of it.
    def own(i: int) -> int:
        details = servers[i].complete([*prompt, 6], 1)["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens") or 0)

    assert own(at) == 10 * BLOCK_SIZE
    assert own(1 - at) == 0


def test_a_killed_server_costs_no_token_and_without_servers_there_is_503(
    route: Route, servers: list[StockServer]
) -> None:
    prompt, n_new = a_prompt(200, 6), 300
    expected = tokens_of(servers[0].complete(prompt, n_new))
    tokens: list[int] = []
    killed = None
    for part in streamed(route.url, prompt, n_new):
        tokens += part
        if killed is None and len(tokens) >= 20:
            killed = route.last_server()
            servers[killed].kill()
    assert killed is not None
    assert tokens == expected
    route.until(lambda: route.live() == {w for w in route.live() if w[7] != str(killed)})
    assert tokens_of(complete(route.url, prompt, 5)) == expected[:5]
    servers[1 - killed].kill()
    route.until(lambda: not route.live())
    refused = httpx.post(f"{route.url}/v1/completions", json=body(prompt, 5), timeout=60)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "worker" in refused.json()["error"]["message"]
