"""`halfmoon route` as a user runs it: what it refuses, what it prints, what it answers."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.route.server_survey import UnfitServers, check_alike, common_block_size
from halfmoon_cli.route.server_tokenizer import NoTokenizer, find_tokenizer
from halfmoon_cli.up.embedded_cluster import ClusterPlan, plan_processes
from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_servers.client.server_description import ServerDescription
from tests.bridge.plain_server import BLOCK_SIZE, PlainServer, answer_of

FAKE = "fake://tiny"


def described(**fields: Any) -> ServerDescription:
    defaults: dict[str, Any] = {
        "url": "http://a",
        "kind": "vllm",
        "version": "0.32.0",
        "model": "m",
        "model_root": "/nowhere/m",
        "max_model_len": 512,
        "block_size": 32,
        "n_blocks": 100,
    }
    return ServerDescription(**(defaults | fields))


@contextmanager
def plain_server(**fields: Any) -> Iterator[PlainServer]:
    """A server in a thread of its own."""
    server, loop = PlainServer(**fields), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(20)

    run(server.open())
    try:
        yield server
    finally:
        run(server.kill())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def refused(*flags: str) -> str:
    result = CliRunner().invoke(app, ["route", *flags], env={"COLUMNS": "500"})
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_without_a_server_the_flag_is_named() -> None:
    assert "--worker http://HOST:PORT" in refused()
    assert "no URL" in refused("--worker", "8001")
    assert "--prefill needs --decode" in refused("--prefill", "http://h:1")
    assert "conductor, servers" in refused("--worker", "http://h:1", "-o", "decode.x=1")


def test_a_server_that_is_not_there_is_named_with_a_way_out() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    text = refused("--worker", url)
    assert url in text and "start it, or leave it out" in text


def test_a_server_whose_tokenizer_is_not_here_needs_the_model() -> None:
    with plain_server() as server:
        text = refused("--worker", server.url)
    assert "'/models/plain'" in text and "--model" in text


def test_a_limit_of_no_seconds_is_refused() -> None:
    with plain_server() as server:
        text = refused("--worker", server.url, "--model", FAKE, "--ttft-slo-s", "0")
    assert "--ttft-slo-s is 0" in text


def test_servers_of_two_models_or_block_sizes_are_refused_naming_both() -> None:
    with pytest.raises(UnfitServers, match=r"http://a serves 'm' and http://b serves 'n'"):
        check_alike([described(), described(url="http://b", model="n")])
    with pytest.raises(UnfitServers, match=r"block_size is 32 at http://a and 16 at http://b"):
        check_alike([described(), described(url="http://b", block_size=16)])
    # One that states none, or one that Halfmoon does not allow, goes by the others.
    unknown = [described(block_size=None), described(block_size=1), described(block_size=64)]
    check_alike(unknown)
    assert common_block_size(unknown) == 64


def test_the_tokenizer_is_found_in_the_folder_that_the_server_names(tmp_path: Path) -> None:
    with pytest.raises(NoTokenizer, match="--model"):
        find_tokenizer(described(model_root=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(described(model_root=str(tmp_path))) == str(tmp_path)


def test_only_a_conductor_and_a_bridge_are_planned() -> None:
    plan = ClusterPlan(model=FAKE, http_port=1, bridge=("--targets", "[]"))
    conductor, bridge = plan_processes(plan)
    assert (conductor.role, bridge.role) == ("conductor", "servers")
    assert plan.metadata_url in bridge.arguments
    assert "--targets" in bridge.arguments


@pytest.mark.e2e
def test_a_route_answers_by_its_servers_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    output = tmp_path / "output"
    with plain_server() as first, plain_server() as second, output.open("wb") as sink:
        flags = ["--worker", first.url, "--worker", second.url, "--model", FAKE]
        process = start_bound(
            [sys.executable, "-m", "halfmoon_cli", "route", "--port", str(port), *flags],
            env={**os.environ, "COLUMNS": "300"},
            cwd=tmp_path,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 120
            while not condition():
                assert process.poll() is None, output.read_text()
                assert time.monotonic() < deadline, output.read_text()
                time.sleep(0.05)

        try:
            until(lambda: "Ctrl-C stops it" in output.read_text())
            children = psutil.Process(process.pid).children(recursive=True)
            prompt = list(range(100, 100 + 4 * BLOCK_SIZE))
            body = {
                "model": "plain",
                "prompt": prompt,
                "max_tokens": 9,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }

            def complete() -> dict[str, Any]:
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                found = answer.json()
                assert isinstance(found, dict)
                return found

            assert complete()["choices"][0]["token_ids"] == answer_of(prompt, 9)

            def n_cached() -> int:
                return int(complete()["usage"]["prompt_tokens_details"]["cached_tokens"])

            # Once its events have come. A busy server may lose a request to the other one.
            until(lambda: n_cached() == 48)
            expected = {f"server-{i}-{r}" for i in (0, 1) for r in ("prefill", "decode", "kvstore")}

            def names() -> set[str]:
                key = (tmp_path / ".halfmoon/route/cluster-key").read_text().strip()
                shown = {"authorization": f"Bearer {operator_token(key)}"}
                cluster = httpx.get(f"{url}/debug/cluster", timeout=10, headers=shown).json()
                return {worker["worker_id"] for worker in cluster["workers"]}

            until(lambda: names() == expected)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        assert not any(child.is_running() for child in children)
