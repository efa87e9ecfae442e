"""A conductor whose loop stands still for longer than leases and heartbeats last."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.membership import LEASE_S
from halfmoon_sandbox.bound_process import start_bound

#: Longer than a lease, and than it takes to fill a socket's queue and miss heartbeats.
STALL_S = LEASE_S + 6
MODEL = "fake://tiny?max_context=100000&step_s=0.02"
CONDUCTOR = f"""
import signal, time
from halfmoon_conductor.__main__ import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep({STALL_S}))
main()
"""


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]", Path]]:
    """Its URL, its process and its log, with a prefill and two decode workers."""
    port, log = free_port(), tmp_path / "conductor.log"
    url, metadata_port = f"http://127.0.0.1:{port}", str(free_port())
    metadata = f"http://127.0.0.1:{metadata_port}/metadata"
    flags = ["--model", MODEL, "--metrics-port", "-1"]
    with ExitStack() as stack:

        def start(*command: str, output: Path) -> "subprocess.Popen[bytes]":
            process = start_bound(
                [sys.executable, *command, *flags],
                stdout=stack.enter_context(output.open("wb")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        ports = ("--http-port", str(port), "--metadata-port", metadata_port)
        conducting = start("-c", CONDUCTOR, *ports, output=log)
        for role, name in (("prefill", "p0"), ("decode", "d0"), ("decode", "d1")):
            module = ("-m", f"halfmoon_{role}", "--worker-id", name)
            start(*module, "--metadata", metadata, output=tmp_path / f"{name}.log")
        _wait_ready(url)
        yield url, conducting, log


def _wait_ready(url: str) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            cluster = httpx.get(f"{url}/debug/cluster", timeout=10).json()
            if len(cluster["workers"]) == 3:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise TimeoutError("the cluster is not ready")


def _stream(url: str, index: int) -> str:
    body = {"model": "tiny", "prompt": f"hello {index}", "max_tokens": 1500, "stream": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=180).text


def _use_both_decode_workers(url: str) -> None:
    """Let prefill look up both segments: the store that knows them will stand still too."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 40}
    used: set[str] = set()
    with ThreadPoolExecutor(4) as threads:
        while len(used) < 2:
            for answer in [
                threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
                for _ in range(4)
            ]:
                assert answer.result().status_code == 200
            decisions = httpx.get(f"{url}/debug/decisions", timeout=10).json()["decisions"]
            used = {each["placement"]["decode"] for each in decisions}


def test_no_worker_is_lost_while_the_conductor_stands_still(
    conductor: tuple[str, "subprocess.Popen[bytes]", Path],
) -> None:
    url, process, log = conductor
    _use_both_decode_workers(url)
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(_stream, url, index) for index in range(4)]
        while httpx.get(f"{url}/load", timeout=10).json()["server_load"] < 4:
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        texts = [each.result() for each in streams]
    for text in texts:
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text
    told = log.read_text()
    assert "worker_joined" in told
    assert "worker_lost" not in told
    assert "request_retried" not in told
