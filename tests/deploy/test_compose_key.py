"""The compose file's cluster key: one container makes it, and all services read it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = {
    name: each
    for name, each in COMPOSE["services"].items()
    if each["image"].startswith("halfmoon-") and name != "cluster-key"
}
FOLDER = "/run/halfmoon"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_reads_the_key_once_it_is_made(name: str) -> None:
    service = SERVICES[name]
    assert f"cluster-key:{FOLDER}:ro" in service["volumes"]
    assert service["depends_on"]["cluster-key"] == {"condition": "service_completed_successfully"}
    given = service["environment"]
    path = f"{FOLDER}/cluster-key"
    assert given["HALFMOON_CLUSTER_KEY_FILE"] == f"${{HALFMOON_CLUSTER_KEY_FILE-{path}}}"
    # A key in .env reaches services by the file: both variables would be an error.
    assert given["HALFMOON_CLUSTER_KEY"] == ""


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
    assert prometheus["depends_on"]["cluster-key"] == {
        "condition": "service_completed_successfully"
    }
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    (discovery,) = config["scrape_configs"][0]["http_sd_configs"]
    made = Path(COMPOSE["services"]["cluster-key"]["entrypoint"][-2]).name
    assert discovery["authorization"] == {
        "type": "Bearer",
        "credentials_file": f"{FOLDER}/{made}",
    }


def test_redis_wants_the_password_that_is_made_with_the_key() -> None:
    redis = COMPOSE["services"]["redis"]
    assert f"cluster-key:{FOLDER}:ro" in redis["volumes"]
    assert redis["depends_on"]["cluster-key"] == {"condition": "service_completed_successfully"}
    made = f"{FOLDER}/{Path(COMPOSE['services']['cluster-key']['entrypoint'][-1]).name}"
    assert redis["command"][1] == f"{made}.conf"
    assert made in redis["healthcheck"]["test"][1]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_names_the_file_of_redis_password(name: str) -> None:
    made = Path(COMPOSE["services"]["cluster-key"]["entrypoint"][-1]).name
    url = SERVICES[name]["environment"]["HALFMOON_METADATA"]
    assert url.rstrip("}").endswith(f"?password_file={FOLDER}/{made}")
