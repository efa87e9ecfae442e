"""What a container makes and prints at its start: the cluster key and the operators' token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon_metadata.cluster_key_source import read_cluster_key_file
from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_runtime.print_operator_token import main


def make(path: Path, *more: Path, key: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "halfmoon_runtime.make_cluster_key", str(path), *map(str, more)],
        env={**os.environ, "HALFMOON_CLUSTER_KEY": key},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster-key"


def test_a_key_is_made_once_for_its_user_alone(path: Path) -> None:
    previous = os.umask(0)
    try:
        assert make(path).returncode == 0
    finally:
        os.umask(previous)
    first = read_cluster_key_file(str(path))
    assert len(first) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert make(path).returncode == 0
    assert read_cluster_key_file(str(path)) == first
    # No draft stays behind.
    assert [each.name for each in path.parent.iterdir()] == ["cluster-key"]
    path.unlink()
    make(path)
    assert read_cluster_key_file(str(path)) != first


def test_a_key_of_the_environment_takes_its_place_and_all_users_may_read_the_token_of_either(
    path: Path,
) -> None:
    token = path.with_name("operator-token")
    for key in ("", "the first of the keys,the second of the keys"):
        assert make(path, token, key=key).returncode == 0
        assert not key or read_cluster_key_file(str(path)) == key
        assert token.read_text().strip() == operator_token(path.read_text())
        assert token.stat().st_mode & 0o777 == 0o644
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_redis_of_the_cluster_gets_a_password_that_stays(path: Path) -> None:
    token, password = path.with_name("operator-token"), path.with_name("redis-password")
    assert make(path, token, password).returncode == 0
    first = password.read_text()
    assert len(first.strip()) == 64 and first.strip() != path.read_text().strip()
    assert make(path, token, password).returncode == 0
    assert password.read_text() == first
    config = path.with_name("redis-password.conf")
    assert config.read_text() == f"requirepass {first}"
    assert {each.stat().st_mode & 0o777 for each in (password, config)} == {0o644}


def test_a_key_that_services_refuse_is_refused_here_in_one_line(path: Path) -> None:
    ended = make(path, path.with_name("operator-token"), key="short")
    assert ended.returncode == 1
    assert "5 characters" in ended.stderr and "Traceback" not in ended.stderr


def test_a_folder_that_is_not_there_is_an_error(path: Path) -> None:
    ended = make(path.parent / "nowhere" / "cluster-key")
    assert ended.returncode != 0
    assert "nowhere" in ended.stderr


KEY = "a key of 16 characters or more"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HALFMOON_CLUSTER_KEY", "HALFMOON_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_it_is_the_token_of_the_key_in_the_services_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster-key"
    path.touch(mode=0o600)
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", str(path))
    main()
    assert capsys.readouterr().out == f"{operator_token(KEY)}\n"


def test_without_a_key_no_token_is_wanted_and_short_ones_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SystemExit, match="want no token"):
        main()
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "short")
    with pytest.raises(SystemExit, match="16 at least"):
        main()
