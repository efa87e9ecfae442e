"""Our four services pass the kit, over TCP, with a cluster key and without."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_conform.check import ServiceRole
from tests.conform.planted_runs import service_command

DEMO = Path(__file__).resolve().parents[2] / "libs/engine/halfmoon_engine/demo/model"


def conform(role: ServiceRole, command: list[str], *options: str) -> None:
    ran = CliRunner().invoke(app, ["conform", role, *options, "--", *command])
    assert ran.exit_code == 0, ran.output[-8000:]


@pytest.mark.e2e
@pytest.mark.parametrize("key", ["--no-key", "--key"])
@pytest.mark.parametrize("role", ["kvstore", "decode", "prefill", "conductor"])
def test_a_service_of_ours_passes_every_check(role: ServiceRole, key: str) -> None:
    conform(role, service_command(role), key)


@pytest.mark.e2e
@pytest.mark.parametrize("key", ["--no-key", "--key"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_with_a_model_passes_its_engines_checks(role: ServiceRole, key: str) -> None:
    command = service_command(role)
    model = command.index("--model")
    command[model + 1] = str(DEMO)
    pool = command.index("--pool-mib")
    command[pool + 1] = "32"
    only = {
        "decode": ["decode.tokens.*", "decode.start.*", "decode.cancel.*", "decode.landing.shape"],
        "prefill": ["prefill.pages.*", "prefill.cached.*", "prefill.done.*", "prefill.put.*"],
    }[role]
    conform(role, [*command, "--threads", "1"], key, *(f"--only={pattern}" for pattern in only))


def test_a_stage_of_a_group_passes_the_checks_of_stages() -> None:
    command = service_command("prefill", more=("--group", "long", "--stage", "1/2"))
    conform("prefill", command, "--only", "prefill.stage.*")
