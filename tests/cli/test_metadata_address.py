"""`--metadata`, `--url` and their variables: the same for every command that takes one."""

import re

import pytest
from typer.testing import CliRunner, Result

from halfmoon_cli.__main__ import app
from halfmoon_metadata.tcp_ports import free_port

WIDE = {"COLUMNS": "400", "NO_COLOR": "1"}
METADATA_COMMANDS = [
    *(
        ("kv", "ls"),
        ("kv", "stat", "key"),
        ("kv", "get", "key", "not-there"),
        ("kv", "drain", "kvstore-0"),
    ),
    *(("p2p", "ls"), ("p2p", "rm", "name"), ("p2p", "get", "name", "not-there")),
    ("transfer", "target"),
]
URL_COMMANDS = [
    *(("chat", "hello"), ("status",), ("roles",), ("roles", "set", "decode-0", "auto")),
    ("bench", "--rate", "1"),
]


def halfmoon(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(app, words, env={**WIDE, **environment})


def option_help(words: tuple[str, ...], option: str) -> str:
    """The line of `--help` on an option, without its frame."""
    lines = halfmoon(*words, "--help").output.splitlines()
    (line,) = (line for line in lines if re.search(rf"{option} ", line))
    return " ".join(line.strip("│ ").split())


@pytest.fixture
def nothing_there() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("words", METADATA_COMMANDS, ids=" ".join)
def test_a_metadata_server_that_is_not_there_is_named_with_the_way_out(
    words: tuple[str, ...], nothing_there: str
) -> None:
    url = f"{nothing_there}/metadata"
    for result in (
        halfmoon(*words, "--metadata", url),
        halfmoon(*words, HALFMOON_METADATA=url),
    ):
        assert result.exit_code == 2
        said = " ".join(result.output.split())
        assert url in said
        assert "`halfmoon up` serves one at http://127.0.0.1:7999/metadata" in said
        assert "--metadata or HALFMOON_METADATA names another" in said


@pytest.mark.parametrize("words", URL_COMMANDS, ids=" ".join)
def test_an_endpoint_that_is_not_there_is_named_with_the_way_out(
    words: tuple[str, ...], nothing_there: str
) -> None:
    result = halfmoon(*words, HALFMOON_URL=nothing_there)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert nothing_there in said and "`halfmoon up` starts a cluster" in said
    assert "--url or HALFMOON_URL names another" in said


@pytest.mark.parametrize(
    ("commands", "option", "default"),
    [
        (METADATA_COMMANDS, "--metadata", "http://127.0.0.1:7999/metadata"),
        (URL_COMMANDS, "--url", "http://127.0.0.1:8000"),
    ],
)
def test_every_command_has_the_same_default_and_help(
    commands: list[tuple[str, ...]], option: str, default: str
) -> None:
    helps = {option_help(words, option) for words in commands}
    assert len(helps) == 1
    assert f"[default: {default}]" in helps.pop()


def test_a_bench_of_a_named_target_looks_for_it_in_the_metadata_of_the_environment(
    nothing_there: str,
) -> None:
    url = f"{nothing_there}/metadata"
    result = halfmoon("transfer", "bench", "--target", "far", HALFMOON_METADATA=url)
    assert result.exit_code == 2
    assert url in " ".join(result.output.split())
