"""The names that the conductor of the compose file answers to."""

import subprocess
from pathlib import Path

import pytest
import yaml

from halfmoon_runtime.allowed_hosts import EVERY_HOST, read_allowed_hosts

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


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


def test_prometheus_asks_under_a_name_that_is_allowed() -> None:
    scraped = (ROOT / "deploy/prometheus.yml").read_text()
    assert "url: http://conductor:8000/" in scraped
