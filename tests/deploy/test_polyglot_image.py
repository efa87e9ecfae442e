"""The image of the TypeScript workers, and their places in the compose file."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples/polyglot/Dockerfile"


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
    workers = {n: each for n, each in services.items() if each.get("profiles") == ["polyglot"]}
    assert sorted(workers) == ["decode-polyglot", "kvstore-polyglot"]
    for name, each in workers.items():
        ours = services[{"decode-polyglot": "decode", "kvstore-polyglot": "kvstore-0"}[name]]
        (script,) = each["command"]
        source = ROOT / "examples/polyglot/src" / Path(script).relative_to("dist")
        assert source.with_suffix(".ts").exists()
        assert each["networks"] == ours["networks"]
        assert each["deploy"]["resources"] == ours["deploy"]["resources"]
        assert each["environment"].items() <= ours["environment"].items()
    assert services["kvstore-0"]["deploy"]["replicas"] == "${KVSTORE:-1}"
    assert services["decode"]["deploy"]["replicas"] == "${DECODE:-2}"
    # The cluster key's file can be read by the services' user alone.
    (user,) = re.findall(r"^USER (\d+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert f"--uid {user}" in (ROOT / "services/Dockerfile").read_text()
