"""The image of the TypeScript workers, and their places in the compose file."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples/polyglot/Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint: tests/deploy/requirements.txt")
def test_the_linter_has_nothing_to_say() -> None:
    # apt's packages are the base image's, which has one version of each.
    done = subprocess.run(
        [str(HADOLINT), "--no-color", "--ignore", "DL3008", str(DOCKERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_made_of_plain_debian_and_what_the_build_may_see() -> None:
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"debian:bookworm-slim"}
    visible = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert source.startswith("libs/") or "!examples/polyglot" in visible
    for left_out in ("examples/polyglot/node_modules", "examples/polyglot/dist"):
        assert left_out in visible


def test_the_profile_has_workers_beside_which_ours_may_be_left_out() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    workers = {
        name: each for name, each in services.items() if each.get("profiles") == ["polyglot"]
    }
    assert sorted(workers) == ["decode-polyglot", "kvstore-polyglot"]
    for name, each in workers.items():
        ours = services[{"decode-polyglot": "decode", "kvstore-polyglot": "kvstore-0"}[name]]
        (script,) = each["command"]
        assert (
            (ROOT / "examples/polyglot/src" / Path(script).relative_to("dist"))
            .with_suffix(".ts")
            .exists()
        )
        assert each["networks"] == ours["networks"]
        assert each["deploy"]["resources"] == ours["deploy"]["resources"]
        assert each["environment"].items() <= ours["environment"].items()
    assert services["kvstore-0"]["deploy"]["replicas"] == "${KVSTORE:-1}"
    assert services["decode"]["deploy"]["replicas"] == "${DECODE:-2}"
    # The cluster key's file can be read by the services' user alone.
    (user,) = re.findall(r"^USER (\d+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert f"--uid {user}" in (ROOT / "services/Dockerfile").read_text()
