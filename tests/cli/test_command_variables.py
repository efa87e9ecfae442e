"""A misspelt variable of a command is named with the right one."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_cli.common.command_variables import COMMAND_VARIABLES, misspelt_command_variables
from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

ROLES = (ConductorSettings, PrefillSettings, DecodeSettings, KvstoreSettings)
LIBS = Path(__file__).parents[2] / "libs"


def said(*words: str, **variables: str) -> str:
    return CliRunner().invoke(app, words, env=variables).stderr


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("HALFMOON_URLL", "HALFMOON_URL"), ("HALFMOON_METADAT", "HALFMOON_METADATA")],
)
def test_a_misspelt_variable_is_named_with_the_right_one(variable: str, meant: str) -> None:
    told = f"halfmoon: {variable} is read by no command: did you mean {meant}?\n"
    assert told in said("paper", **{variable: "x"})


def test_what_commands_and_services_read_is_not_taken_for_misspelt() -> None:
    settings = {name for role in ROLES for name in role.model_fields} | COMMAND_VARIABLES
    variables = [f"HALFMOON_{name.upper()}" for name in settings]
    assert misspelt_command_variables([*variables, "HALFMOON_OF_ANOTHER_PROGRAM", "URLL"]) == []


def test_every_variable_that_commands_read_is_known() -> None:
    folders = LIBS / "cli/halfmoon_cli", LIBS / "metadata/halfmoon_metadata"
    read = {
        name.lower()
        for folder in folders
        for path in folder.rglob("*.py")
        for name in re.findall(r'"HALFMOON_([A-Z_]+)"', path.read_text())
    }
    # What a process is given by `up`, not by its user.
    assert read - {"status_file"} <= COMMAND_VARIABLES


def test_commands_that_start_services_leave_it_to_them() -> None:
    assert "read by no command" not in said("up", "--model", "./nowhere", HALFMOON_URLL="x")
