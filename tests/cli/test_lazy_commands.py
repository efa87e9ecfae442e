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


#: What takes long to import: at the start of a subcommand none of it is needed.
COSTLY = frozenset(
    {
        "aiohttp",
        "asyncio",
        "halfmoon_conform.catalogue",
        "halfmoon_engine",
        "halfmoon_metadata.store_registry",
        "halfmoon_scheduling.conductor",
        "halfmoon_simulator.cluster",
        "httpx",
        "matplotlib",
        "numpy",
        "prometheus_client",
        "pydantic_settings",
        "structlog",
        "torch",
        "transformers",
        "zmq",
    }
)


def imported_by(*arguments: str, **settings: str) -> tuple[set[str], str]:
    """Run the command in a process; return the modules that it has at its end, and its output."""
    told = (
        "import sys\nfrom halfmoon_cli.__main__ import app\n"
        "try:\n    app(prog_name='halfmoon')\n"
        "finally:\n    print('IMPORTED', *(name for name in sys.modules), file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", told, *arguments],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    imported = set(run.stderr.partition("IMPORTED")[2].split())
    assert "halfmoon_cli.lazy_commands" in imported, run.stderr
    return imported, run.stdout


def test_help_and_completion_import_no_subcommand() -> None:
    names = {lazy.place.partition(":")[0] for lazy in COMMANDS.values()}
    completes = {
        "_HALFMOON_COMPLETE": "complete_bash",
        "COMP_WORDS": "halfmoon st",
        "COMP_CWORD": "1",
    }
    for arguments, settings in ((["--help"], {}), (["--version"], {}), ([], completes)):
        imported, output = imported_by(*arguments, **settings)
        assert not imported & names
        assert not imported & {*COSTLY, "halfmoon_runtime"}
    assert output.split() == ["status"], "what the shell completes"


#: Shows the help of each command in a fork of a process that has imported none of them.
_HELP = """
import os, sys
from halfmoon_cli.__main__ import app
folder, *names = sys.argv[1:]
for name in names:
    if os.fork() == 0:
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["halfmoon", name, "--help"]
        try:
            app(prog_name="halfmoon")
        finally:
            print("IMPORTED", *sys.modules, flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], str]]:
    """The modules that the help of each command needs, and the help."""
    folder = tmp_path_factory.mktemp("help")
    command = [sys.executable, "-c", _HELP, str(folder), *COMMANDS]
    subprocess.run(command, capture_output=True, check=True)
    found = {}
    for name in COMMANDS:
        output, _, imported = (folder / name).read_text().partition("IMPORTED")
        found[name] = set(imported.split()), output
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_subcommand_imports_nothing_that_it_needs_only_when_it_runs(
    helps: dict[str, tuple[set[str], str]], name: str
) -> None:
    imported, output = helps[name]
    assert COMMANDS[name].place.partition(":")[0] in imported
    assert "Usage" in output
    assert not imported & COSTLY


def test_status_imports_an_http_client_and_no_service() -> None:
    imported, _ = imported_by("status", "--url", "http://127.0.0.1:1", HALFMOON_STATE="/nowhere")
    assert "httpx" in imported
    assert not imported & COSTLY - {"httpx"}


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
