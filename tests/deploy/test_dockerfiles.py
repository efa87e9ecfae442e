"""Dockerfiles: what a linter says of them, and that the ones which repeat each other agree."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "services").glob("*/Dockerfile"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)
#: Rules with another answer here: apt's packages are the base image's, which has one version of
#: each; pip's are pinned by constraints.txt; its cache is a mount, and in no layer.
ANSWERED = ("DL3008", "DL3013", "DL3042")


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.parent.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: tests/deploy/requirements.txt")
def test_the_linter_has_nothing_to_say(dockerfile: Path) -> None:
    ignored = [flag for rule in ANSWERED for flag in ("--ignore", rule)]
    done = subprocess.run(
        [str(HADOLINT), "--no-color", *ignored, str(dockerfile)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_registry_is_named_and_no_frontend_is_fetched(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert not re.search(r"^# *syntax *=", text, re.MULTILINE)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    assert set(bases) - stages == {"python:3.11-slim", *({"scratch"} & set(bases))}


def test_an_image_runs_as_nobody_and_says_whether_it_is_well(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    # Kubernetes can't tell from a name whether it is root's.
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001"
    assert "useradd --system --uid 10001 " in text
    assert "\nHEALTHCHECK " in text


def test_prefill_and_decode_share_the_layers_with_torch() -> None:
    """A layer is kept once for both while the lines that make it are the same."""
    prefill, decode = (
        (ROOT / f"services/{role}/Dockerfile").read_text().partition("FROM scratch")[2]
        for role in ("prefill", "decode")
    )
    n_shared = prefill.index("COPY services/")
    assert prefill[:n_shared] == decode[:n_shared]
    assert prefill[n_shared:].replace("prefill", "decode") == decode[n_shared:]
