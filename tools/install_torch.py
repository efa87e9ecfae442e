"""Install torch into an environment: the build for CPUs where no GPU is, else the index's own.

Usage: PYTHON-OF-THE-ENVIRONMENT tools/install_torch.py [auto|cpu|default]

The index's own build for Linux brings CUDA: some 3 GB to fetch, where the CPU's has 0.2 GB. A pip
that is set up for other indexes or folders is used as it is: they decide which builds there are.

With `PIP_PYTHON` in the environment, pip installs into that interpreter's environment: so an image
is made. Imports the standard library alone: it runs before anything is installed.
"""

import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Literal, get_args

Build = Literal["auto", "cpu", "default"]

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
#: Where PyTorch has its builds for CPUs (https://pytorch.org/get-started/locally/).
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Files that a driver for GPUs makes: NVIDIA's, and AMD's.
GPU_FILES = ("/proc/driver/nvidia/version", "/dev/kfd")
#: Settings of pip that say where packages come from.
_SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
_REACH_S = 5.0


def choose_build(
    build: Build, *, has_gpu: bool, has_own_sources: bool, reaches: bool
) -> tuple[list[str], str]:
    """Return further arguments for pip, and one line that says what is fetched.

    Args:
        build: what is wanted.
        has_gpu: whether a GPU is here.
        has_own_sources: whether pip is set up for other indexes or folders.
        reaches: whether the index of CPU builds answers.
    """
    if build == "default" or (build == "auto" and has_gpu):
        why = "a GPU is here" if has_gpu else "TORCH=default"
        return [], f"torch as the package index has it ({why}): up to 3 GB with CUDA"
    if has_own_sources:
        return [], "torch from where pip is set up to look"
    if not reaches:
        missing = f"{CPU_INDEX} does not answer"
        return [], f"torch as the package index has it ({missing}): up to 3 GB with CUDA"
    why = "TORCH=cpu" if build == "cpu" else "no GPU is here; TORCH=default takes the other build"
    return ["--extra-index-url", CPU_INDEX], f"torch's build for CPUs ({why}): 0.2 GB"


def _has_own_sources() -> bool:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    names = {line.partition("=")[0].rpartition(".")[2] for line in listed.stdout.splitlines()}
    return not names.isdisjoint(_SOURCES)


def _reaches(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=_REACH_S):
            return True
    except OSError:
        return False


def main(wanted: str = "auto") -> int:
    """Install torch, and return pip's exit status."""
    builds: tuple[Build, ...] = get_args(Build)
    build = next((each for each in builds if each == wanted), None)
    if build is None:
        print(f"TORCH is {wanted!r}; it is one of {', '.join(builds)}", file=sys.stderr)
        return 2
    has_gpu = any(Path(each).exists() for each in GPU_FILES)
    has_own_sources = _has_own_sources()
    may_ask = not has_own_sources and (build == "cpu" or (build == "auto" and not has_gpu))
    more, line = choose_build(
        build,
        has_gpu=has_gpu,
        has_own_sources=has_own_sources,
        reaches=may_ask and _reaches(CPU_INDEX),
    )
    print(f"{line} …", flush=True)
    # Its bar of progress is wanted on a terminal: this is the largest download.
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    return subprocess.run(
        [*command, "-c", str(CONSTRAINTS), *more, "torch"], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
