"""Start the compared systems, each with the model "bench" behind one URL.

halfmoon              1 prefill, 1 decode, 1 kvstore and a conductor
halfmoon-limits       the same, told of the limits: it may refuse requests
halfmoon-vllm         the same, but prefill and decode compute by vLLM
vllm                  one server
vllm-cache-aware      two servers behind vllm-router, by prefix
vllm-round-robin      two servers behind vllm-router, in turns
vllm-pd               a prefill and a decode server, NIXL over TCP, behind vllm-router
"""

import os
import subprocess
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from benchmarks.vllm_cpu import (
    ENVIRONMENTS,
    our_vllm_python,
    vllm_environment,
    vllm_python,
    vllm_server,
    wait_ready,
)
from halfmoon_cli.up.embedded_cluster import ClusterPlan, EmbeddedCluster
from halfmoon_cli.up.worker_threads import worker_threads
from halfmoon_metadata.tcp_ports import free_port

ROUTER = "vllm-router==0.1.17"
_READY_WITHIN_S = 300.0
_NIXL_CONNECTOR = (
    '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}'
)


@dataclass(frozen=True)
class SystemChoices:
    """What all systems have in common."""

    model: Path
    dtype: str
    #: Threads of the machine; systems of two servers get half of them for each.
    threads: int
    #: vLLM without compilation.
    eager: bool
    #: Limits of the system that is told of them, seconds; None: not known yet.
    ttft_limit_s: float | None = None
    tbt_limit_s: float | None = None
    #: Further flags of `vllm serve`.
    vllm_flags: tuple[str, ...] = ()
    #: Further environment variables of it.
    vllm_variables: tuple[tuple[str, str], ...] = ()
    #: Further flags of Halfmoon's services: role and flag.
    halfmoon_flags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class RunningSystem:
    """A system that is ready."""

    url: str
    #: Its processes; their descendants belong to it.
    pids: tuple[int, ...]


@contextmanager
def _halfmoon(
    choices: SystemChoices, *, limits: bool = False, engine: str = "torch"
) -> Iterator[RunningSystem]:
    extra: dict[str, list[str]] = {
        role: [f"--dtype={choices.dtype}"] for role in ("prefill", "decode")
    }
    if limits:
        flags = (("--ttft-slo-s", choices.ttft_limit_s), ("--tbt-slo-s", choices.tbt_limit_s))
        extra["conductor"] = [f"{flag}={value:g}" for flag, value in flags if value is not None]
    for role, flag in choices.halfmoon_flags:
        extra.setdefault(role, []).append(flag)
    if engine == "vllm":
        os.environ["VLLM_CACHE_ROOT"] = vllm_environment(choices.threads)["VLLM_CACHE_ROOT"]
        for role in ("prefill", "decode"):
            eager = str(choices.eager).lower()
            extra[role].append(f'--engine-options={{"enforce_eager": "{eager}"}}')
    plan = ClusterPlan(
        model=str(choices.model),
        http_port=free_port(),
        served_model_name="bench",
        engine=engine,
        worker_python=str(our_vllm_python()) if engine == "vllm" else "",
        threads=worker_threads(choices.threads, 1, 1, engine),
        extra=extra,
    )
    with (
        tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as folder,
        EmbeddedCluster(plan, Path(folder)) as cluster,
        httpx.Client() as client,
    ):
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while not (cluster.ready() and _answers(client, f"{plan.url}/ready")):
            if dead := cluster.dead():
                raise RuntimeError("\n".join(dead[0].last_lines()))
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"Halfmoon is not ready within {_READY_WITHIN_S:g} s")
            time.sleep(0.1)
        yield RunningSystem(plan.url, tuple(each.pid for each in cluster.processes.values()))


@contextmanager
def _one_vllm(choices: SystemChoices) -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as folder, ExitStack() as stack:
        url, server = start_server(choices, Path(folder), stack, "vllm", choices.threads)
        wait_ready(f"{url}/health", [server], Path(folder))
        yield RunningSystem(url, (server.pid,))


@contextmanager
def _two_vllm(choices: SystemChoices, *, policy: str) -> Iterator[RunningSystem]:
    threads = max(1, choices.threads // 2)
    with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        started = [start_server(choices, folder, stack, f"vllm-{i}", threads) for i in range(2)]
        servers = [server for _, server in started]
        for url, _ in started:
            wait_ready(f"{url}/health", servers, folder)
        urls = [url for url, _ in started]
        yield start_router(["--policy", policy, "--worker-urls", *urls], servers, folder, stack)


@contextmanager
def _vllm_pd(choices: SystemChoices) -> Iterator[RunningSystem]:
    threads = max(1, choices.threads // 2)
    with tempfile.TemporaryDirectory(prefix="halfmoon-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        flags = ["--kv-transfer-config", _NIXL_CONNECTOR]
        started = [
            start_server(
                choices,
                folder,
                stack,
                role,
                threads,
                flags=flags,
                variables={
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                    "UCX_TLS": "tcp",
                },
            )
            for role in ("prefill", "decode")
        ]
        servers = [server for _, server in started]
        for url, _ in started:
            wait_ready(f"{url}/health", servers, folder)
        (prefill, _), (decode, _) = started
        flags = ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        yield start_router([*flags, "--policy", "round_robin"], servers, folder, stack)


Start = Callable[[SystemChoices], AbstractContextManager[RunningSystem]]
SYSTEMS: dict[str, Start] = {
    "halfmoon": _halfmoon,
    "halfmoon-limits": partial(_halfmoon, limits=True),
    "halfmoon-vllm": partial(_halfmoon, engine="vllm"),
    "vllm": _one_vllm,
    "vllm-cache-aware": partial(_two_vllm, policy="cache_aware"),
    "vllm-round-robin": partial(_two_vllm, policy="round_robin"),
    "vllm-pd": _vllm_pd,
}


def install(names: Sequence[str]) -> None:
    """Make the environments that these systems need.

    Raises:
        InstallFailed: vLLM can't be installed; says why.
        CalledProcessError: pip failed; it has said why.
        OSError: no room, or no rights.
    """
    if "halfmoon-vllm" in names:
        our_vllm_python()
    if any(name.startswith("vllm") for name in names):
        vllm_python()
    if set(names) & {"vllm-cache-aware", "vllm-round-robin", "vllm-pd"}:
        _router()


def start_server(
    choices: SystemChoices,
    folder: Path,
    stack: ExitStack,
    name: str,
    threads: int,
    *,
    flags: Sequence[str] = (),
    variables: dict[str, str] | None = None,
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server of vLLM; return its URL and process. It may not be ready yet."""
    port = free_port()
    common = ["--dtype", choices.dtype, "--kv-cache-memory-bytes", str(2**30)]
    common += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if choices.eager:
        common.append("--enforce-eager")
    server = stack.enter_context(
        vllm_server(
            choices.model,
            port,
            folder,
            threads=threads,
            flags=[*common, *choices.vllm_flags, *flags],
            variables=dict(choices.vllm_variables) | (variables or {}),
            name=name,
        )
    )
    return f"http://127.0.0.1:{port}", server


def start_router(
    flags: Sequence[str],
    servers: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    stack: ExitStack,
) -> RunningSystem:
    """Start vLLM's router in front of servers, and wait until it is ready.

    Raises:
        RuntimeError: it ended, or is late.
    """
    port = free_port()
    command = [_router(), "--host", "127.0.0.1", "--port", port, "--log-level", "error", *flags]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    with (folder / "router.log").open("wb") as log:
        router = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    stack.callback(_end, router)
    url = f"http://127.0.0.1:{port}"
    wait_ready(f"{url}/v1/models", [router, *servers], folder)
    return RunningSystem(url, (router.pid, *(server.pid for server in servers)))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _router() -> Path:
    """Return the router's program, in an environment that is made if it is not there."""
    folder = ENVIRONMENTS / "vllm-router"
    program = folder / "bin" / "vllm-router"
    if not program.exists():
        venv.create(folder, with_pip=True)
        pip = [str(program.with_name("python")), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", ROUTER], check=True)
    return program


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False
