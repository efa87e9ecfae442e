"""Start the measured processes, each listening on a port with the model "bench"."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from halfmoon_metadata.tcp_ports import free_port

ENVIRONMENTS = Path.home() / ".cache" / "halfmoon" / "bench-venvs"
READY_WITHIN_S = 60.0
_STOP_WITHIN_S = 15.0
#: Rates are measured with a core for the process in question and the other one for what it
#: talks with. Latencies are not: a socket's I/O thread would wait for the thread that it serves.
OWN_CORE, OTHER_CORE, ANY_CORE = "0", "1", "0,1"

#: Label: package on PyPI, and the program's arguments but for its port and its worker.
ROUTERS: dict[str, tuple[str, list[str]]] = {
    "smg, round robin": (
        "smg==1.13.0",
        ["launch", "--policy", "round_robin", "--log-level", "error"],
    ),
    "smg, cache aware": (
        "smg==1.13.0",
        ["launch", "--policy", "cache_aware", "--log-level", "error"],
    ),
    "vllm-router, round robin": (
        "vllm-router==0.1.17",
        ["--policy", "round_robin", "--log-level", "error"],
    ),
    "vllm-router, cache aware": (
        "vllm-router==0.1.17",
        ["--policy", "cache_aware", "--log-level", "error"],
    ),
}
DIRECT, HALFMOON = "fake server, no router", "halfmoon"
#: Our conductor before the same server as the routers, through its bridge.
ROUTE = "halfmoon route"
#: Our fake workers asked directly, by whoever speaks their protocol.
WORKERS = "fake workers, no conductor"


@dataclass(frozen=True)
class Target:
    """Something that serves."""

    port: int
    #: The processes whose cost is asked for; empty: none is between client and engine.
    pids: tuple[int, ...] = ()
    #: Port of the metadata server; 0: there is none.
    metadata_port: int = 0


@contextmanager
def running(
    label: str,
    tokenizer: Path,
    tokens: Sequence[int],
    step_s: float,
    folder: Path,
    *,
    cores: str = OWN_CORE,
) -> Iterator[Target]:
    """One of the targets, ready.

    Args:
        label: which.
        tokenizer: folder with the tokenizer of texts.
        tokens: what our fake workers say, in turns.
        step_s: seconds between two tokens of a request.
        folder: for logs.
        cores: those that what is measured may run on.

    Raises:
        RuntimeError: it ended, or is not ready in time.
        OSError, CalledProcessError: a router can't be installed.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(core: str, *command: object) -> int:
        with (folder / f"{label}.log").open("ab") as log:
            words = ["taskset", "-c", core, *map(str, command)]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        processes.append(process)
        return process.pid

    port, behind, metadata_port = free_port(), free_port(), free_port()
    here = (sys.executable, "-m")
    program = [*here, "benchmarks.conductor.fake_server"]
    try:
        if label == HALFMOON:
            flags = ["--metadata", "embedded", "--model", tokenizer, "--served-model-name", "bench"]
            more = ["--http-port", port, "--metadata-port", metadata_port, "--metrics-port", "-1"]
            pid = start(cores, *here, "halfmoon_conductor", *flags, *more)
            _wait(port, "/health", processes, folder / f"{label}.log")
            words = ",".join(map(str, tokens))
            fakes = (*here, "benchmarks.conductor.fake_workers")
            start(OTHER_CORE, *fakes, f"http://127.0.0.1:{metadata_port}/metadata", step_s, words)
            _wait(port, "/ready", processes, folder / f"{label}.log")
            yield Target(port, (pid,), metadata_port)
        elif label == DIRECT:
            start(OTHER_CORE, *program, port, step_s)
            _wait(port, "/health", processes, folder / f"{label}.log")
            yield Target(port)
        elif label == ROUTE:
            start(OTHER_CORE, *program, behind, step_s)
            _wait(behind, "/health", processes, folder / f"{label}.log")
            before = [f"--worker=http://127.0.0.1:{behind}", "--no-limits", "--model", tokenizer]
            own = ["--served-model-name", "bench", "--port", port, "--state", folder / "route"]
            route = psutil.Process(start(cores, *here, "halfmoon_cli", "route", *before, *own))
            _wait(port, "/ready", processes, folder / f"{label}.log")
            yield Target(port, tuple(child.pid for child in route.children(recursive=True)))
        else:
            package, arguments = ROUTERS[label]
            executable = _installed(package)
            start(OTHER_CORE, *program, behind, step_s)
            _wait(behind, "/health", processes, folder / f"{label}.log")
            url = f"http://127.0.0.1:{behind}"
            metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
            where = ["--worker-urls", url, "--host", "127.0.0.1", "--port", port, *metrics]
            pid = start(cores, executable, *arguments, *where)
            _wait(port, "/v1/models", processes, folder / f"{label}.log")
            yield Target(port, (pid,))
    finally:
        for process in processes:
            process.terminate()  # a route stops its own processes
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _installed(package: str) -> Path:
    """A router's program, in an environment of its own that is made if it is not there."""
    name = package.split("==")[0]
    program = ENVIRONMENTS / name / "bin" / name
    if not program.exists():
        venv.create(ENVIRONMENTS / name, with_pip=True)
        pip = [str(program.with_name("python")), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", package], check=True)
    return program


def _wait(port: int, path: str, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while True:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"ended at once:\n{log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not ready within {READY_WITHIN_S} s, see {log}")
        time.sleep(0.1)


def stage_seconds(port: int) -> dict[str, tuple[float, float]]:
    """Seconds in each stage of the time to first token so far, and how often; of our conductor."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(
        r'^halfmoon_ttft_stage_seconds_(sum|count)\{stage="(\w+)"\} (\S+)$', text, re.MULTILINE
    )
    values = {(stage, kind): float(value) for kind, stage, value in found}
    stages = dict.fromkeys(stage for _, stage, _ in found)
    return {stage: (values[stage, "sum"], values[stage, "count"]) for stage in stages}


def run_load(plan: bytes) -> bytes:
    """Carry out a plan of `load`; its figures."""
    command = ["taskset", "-c", OTHER_CORE, sys.executable, "-m", "benchmarks.conductor.load"]
    done = subprocess.run(command, input=plan, stdout=subprocess.PIPE, check=True, env=os.environ)
    return done.stdout


def run_round_trips(
    metadata_port: int, rate: float, seconds: float, n_tokens: int, seed: int
) -> list[float]:
    """Seconds that the workers in this metadata server take without a conductor in between."""
    here = ["taskset", "-c", ANY_CORE, sys.executable, "-m", "benchmarks.conductor.round_trips"]
    words = [f"http://127.0.0.1:{metadata_port}/metadata", rate, seconds, n_tokens, seed]
    done = subprocess.run([*here, *map(str, words)], stdout=subprocess.PIPE, check=True)
    taken_s: list[float] = json.loads(done.stdout)
    return taken_s
