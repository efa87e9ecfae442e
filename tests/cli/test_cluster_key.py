"""Commands take the cluster key from its variable or its file, and use its first line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app
from halfmoon_runtime.observability.operator_tokens import operator_token

OLD = "the moon is made of green cheese"
NEW = "the moon is made of blue cheese"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cluster-key"
    path.touch(0o600)
    path.write_text(f"{NEW}\n{OLD}\n")
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", str(path))
    return path


def run() -> tuple[int, str]:
    done = CliRunner().invoke(app, ["operator-token"])
    assert "cheese" not in done.output
    return done.exit_code, " ".join(done.output.split())


def test_a_command_reads_the_file_and_shows_the_token_of_the_first_key(file: Path) -> None:
    assert run() == (0, operator_token(NEW))


def test_what_is_wrong_with_a_key_is_told_and_never_the_key(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o644)
    status, told = run()
    assert status == 2 and f"chmod 600 {file}" in told
    file.chmod(0o600)
    file.write_text(f"{NEW}\nhunter2")
    status, told = run()
    assert status == 2 and "cluster key 2 of 2: a key of 7 characters" in told
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", NEW)
    status, told = run()
    assert status == 2 and "HALFMOON_CLUSTER_KEY and HALFMOON_CLUSTER_KEY_FILE" in told


def test_without_a_key_both_variables_are_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY_FILE")
    status, told = run()
    assert status == 2 and "HALFMOON_CLUSTER_KEY is not set, nor HALFMOON_CLUSTER_KEY_FILE" in told
