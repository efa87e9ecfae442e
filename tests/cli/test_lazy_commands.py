"""The `halfmoon` command: quick to start, and right about its subcommands."""

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from halfmoon_cli.__main__ import COMMANDS, app
from halfmoon_cli.lazy_commands import LazyCommand


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("name", "lazy"), COMMANDS.items())
def test_the_list_of_commands_says_what_a_command_says_of_itself(
    name: str, lazy: LazyCommand
) -> None:
    command = lazy.load()
    if isinstance(command, typer.Typer):
        callback = command.registered_callback
        text = (callback and callback.callback and callback.callback.__doc__) or command.info.help
    else:
        text = command.__doc__
    assert isinstance(text, str)
    assert lazy.summary == " ".join(text.partition("\n\n")[0].split())
    assert lazy.summary.split()[0] in shown(name, "--help")


def test_help_and_completion_import_no_subcommand() -> None:
    names = {lazy.place.partition(":")[0] for lazy in COMMANDS.values()}
    told = (
        "import sys\nfrom halfmoon_cli.__main__ import app\n"
        "try:\n    app()\n"
        "finally:\n    print('IMPORTED', *(name for name in sys.modules), file=sys.stderr)\n"
    )
    for arguments, settings in (
        (["--help"], {}),
        (["--version"], {}),
        (
            [],
            {"_HALFMOON_COMPLETE": "complete_bash", "COMP_WORDS": "halfmoon st", "COMP_CWORD": "1"},
        ),
    ):
        run = subprocess.run(
            [sys.executable, "-c", told.replace("app()", "app(prog_name='halfmoon')"), *arguments],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
        )
        imported = set(run.stderr.partition("IMPORTED")[2].split())
        assert "halfmoon_cli.lazy_commands" in imported
        assert not imported & names
        assert not imported & {"numpy", "httpx", "aiohttp", "torch", "halfmoon_runtime"}
    assert run.stdout.split() == ["status"], "what the shell completes"


def test_the_version_is_printed() -> None:
    assert shown("--version") == "halfmoon 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["statu"], "status"), (["up", "--prefil", "2"], "--prefill"), (["kv", "drian"], "drain")],
)
def test_a_misspelt_word_is_answered_by_the_nearest_right_one(
    arguments: list[str], meant: str
) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert meant in result.output
