"""`.env.example` knows every variable of docker-compose.yml, and every setting of every service."""

import re
from pathlib import Path

import pytest

from halfmoon_runtime.setting_names import ENVIRONMENT_PREFIX
from halfmoon_runtime.settings import ServiceSettings
from tests.deploy.conftest import ROLES

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / ".env.example").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()
IMAGE = dict(re.findall(r"(HALFMOON_[A-Z_]+)=(\S+)", (ROOT / "services/Dockerfile").read_text()))
SERVICES = [*ROLES.values()]
#: What the compose file gives each container itself.
GIVEN = {"HALFMOON_WORKER_ID", "HALFMOON_HOST_ID", "HALFMOON_HTTP_PORT", "HALFMOON_DISK_PATH"}


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_there_with_its_default(service: type[ServiceSettings]) -> None:
    for name, field in service.model_fields.items():
        variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
        if variable in GIVEN:
            continue
        line = re.search(rf"^#? ?{variable}=(.*)$", EXAMPLE, re.MULTILINE)
        assert line, f"{variable} is not in .env.example: {field.description}"
        if f"{variable}:" in COMPOSE or field.is_required() or name == "cluster_key":
            continue  # the compose file says it
        value = {} if field.default_factory is dict else field.default
        default = IMAGE.get(variable, "" if value is None else str(value))
        assert line[1] == default, f"{variable} has another default in .env.example"


def test_every_variable_of_the_compose_file_is_there_with_its_default() -> None:
    for name, default in re.findall(r"\$\{([A-Z_]+):?-([^${}]*)\}", COMPOSE):
        assert re.search(rf"^#? ?{name}={re.escape(default)}$", EXAMPLE, re.MULTILINE), (
            f"{name}={default} is not in .env.example"
        )


def test_nothing_is_in_it_that_nobody_reads() -> None:
    settings = {f"{ENVIRONMENT_PREFIX}{n.upper()}" for s in SERVICES for n in s.model_fields}
    variables = set(re.findall(r"\$\{([A-Z_]+)", COMPOSE))
    for name in re.findall(r"^#? ?([A-Z_]+)=", EXAMPLE, re.MULTILINE):
        # Variables of OpenTelemetry's are its SDK's to read.
        is_theirs = name == "COMPOSE_PROFILES" or name.startswith("OTEL_")
        assert is_theirs or name in settings | variables, name
