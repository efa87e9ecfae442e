"""The compose file: its keys, the conductor's names, a group, and workers in TypeScript."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfmoon_protocol.ids import WorkerId
from halfmoon_runtime.allowed_hosts import EVERY_HOST, read_allowed_hosts
from halfmoon_scheduling.placement.prefill_groups import complete_groups, group_faults
from halfmoon_testing.scheduling_inputs import a_worker
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = {
    name: each
    for name, each in COMPOSE["services"].items()
    if each["image"].startswith("halfmoon-") and name != "cluster-key"
}
FOLDER = "/run/halfmoon"


ONCE_MADE = {"condition": "service_completed_successfully"}


def made_last(n: int) -> str:
    """The name of a file that is made with the key."""
    return Path(COMPOSE["services"]["cluster-key"]["entrypoint"][-n]).name


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_reads_the_key_once_it_is_made(name: str) -> None:
    service = SERVICES[name]
    assert f"cluster-key:{FOLDER}:ro" in service["volumes"]
    assert service["depends_on"]["cluster-key"] == ONCE_MADE
    given = service["environment"]
    path = f"{FOLDER}/cluster-key"
    assert given["HALFMOON_CLUSTER_KEY_FILE"] == f"${{HALFMOON_CLUSTER_KEY_FILE-{path}}}"
    # A key in .env reaches services by the file: both variables would be an error.
    assert given["HALFMOON_CLUSTER_KEY"] == ""
    password = f"?password_file={FOLDER}/{made_last(1)}"
    assert given["HALFMOON_METADATA"].rstrip("}").endswith(password)


def test_the_container_that_makes_the_key_has_no_network_and_a_key_of_ones_own() -> None:
    maker = COMPOSE["services"]["cluster-key"]
    assert maker["network_mode"] == "none" and maker["restart"] == "no"
    *_, module, path, token_path, password_path = maker["entrypoint"]
    assert module == "halfmoon_runtime.make_cluster_key"
    # The images have this folder, of the services' user: a new volume there is that user's too.
    assert maker["volumes"] == [f"cluster-key:{Path(path).parent}"]
    assert Path(token_path).parent == Path(password_path).parent == Path(path).parent
    assert maker["environment"] == {"HALFMOON_CLUSTER_KEY": "${HALFMOON_CLUSTER_KEY:-}"}


def test_prometheus_reads_the_operators_token_that_is_made_with_the_key() -> None:
    prometheus = COMPOSE["services"]["prometheus"]
    assert f"cluster-key:{FOLDER}:ro" in prometheus["volumes"]
    assert prometheus["depends_on"]["cluster-key"] == ONCE_MADE
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    token = {"type": "Bearer", "credentials_file": f"{FOLDER}/{made_last(2)}"}
    assert discovery["authorization"] == token


def test_redis_wants_the_password_that_is_made_with_the_key() -> None:
    redis = COMPOSE["services"]["redis"]
    assert f"cluster-key:{FOLDER}:ro" in redis["volumes"]
    assert redis["depends_on"]["cluster-key"] == ONCE_MADE
    made = f"{FOLDER}/{made_last(1)}"
    assert redis["command"][1] == f"{made}.conf"
    assert made in redis["healthcheck"]["test"][1]


@pytest.mark.parametrize(
    ("env_file", "names"),
    [
        ({}, ("conductor",)),
        ({"HALFMOON_ALLOWED_HOSTS": "llm.example.com"}, ("conductor", "llm.example.com")),
        # Keys keep pages of elsewhere out: any name, unless some are listed.
        ({"HALFMOON_TENANTS": "/run/tenants.toml"}, ("conductor", EVERY_HOST)),
        (
            {"HALFMOON_TENANTS": "/run/tenants.toml", "HALFMOON_ALLOWED_HOSTS": "llm.example.com"},
            ("conductor", "llm.example.com"),
        ),
    ],
)
def test_other_containers_call_the_conductor_by_its_service(
    env_file: dict[str, str], names: tuple[str, ...]
) -> None:
    assert "conductor" in COMPOSE["services"]
    written = COMPOSE["services"]["conductor"]["environment"]["HALFMOON_ALLOWED_HOSTS"]
    # Compose's interpolation of these forms is the shell's.
    told = subprocess.run(
        ["sh", "-c", f'printf %s "{written}"'], env=env_file, capture_output=True, check=True
    )
    assert read_allowed_hosts(told.stdout.decode()) == names


PREFIX = "HALFMOON_"


def settings_of(service: dict[str, Any], **chosen: str) -> PrefillSettings:
    """The settings of a service's container, with these variables for the compose file."""

    def value(match: re.Match[str]) -> str:
        return chosen.get(match[1], match[2])

    fields = {
        name.removeprefix(PREFIX).lower(): re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", value, str(text))
        for name, text in service["environment"].items()
        # Networks and files that only containers have.
        if "SUBNET" not in str(text) and not name.startswith("HALFMOON_CLUSTER_KEY")
    }
    return PrefillSettings.model_validate(fields)


@pytest.mark.parametrize("only", ["False", "True"])
def test_the_profile_group_has_each_stage_of_one_group_once(only: str) -> None:
    services = COMPOSE["services"]
    members = {name: each for name, each in services.items() if each.get("profiles") == ["group"]}
    found = {name: settings_of(each, STAGE_LAYERS_ONLY=only) for name, each in members.items()}
    workers = [a_worker(name, stage=each.stage_record) for name, each in found.items()]
    (group,) = complete_groups(workers)
    assert group.members == tuple(map(WorkerId, sorted(members)))
    assert group_faults(workers) == {}
    assert {each.stage_layers_only for each in found.values()} == {only == "True"}
    for each in members.values():
        assert each["image"] == services["prefill"]["image"]
        assert each["networks"] == services["prefill"]["networks"]


POLYGLOT = ROOT / "examples/polyglot/Dockerfile"


def test_the_image_is_made_of_plain_debian_and_what_the_build_may_see() -> None:
    text = POLYGLOT.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"debian:bookworm-slim"}
    visible = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists(), source
            assert source.startswith("libs/") or "!examples/polyglot" in visible
    for left_out in ("examples/polyglot/node_modules", "examples/polyglot/dist"):
        assert left_out in visible


def test_the_profile_has_workers_beside_which_ours_may_be_left_out() -> None:
    services = COMPOSE["services"]
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
    (user,) = re.findall(r"^USER (\d+)", POLYGLOT.read_text(), re.MULTILINE)
    assert f"--uid {user}" in (ROOT / "services/Dockerfile").read_text()
