"""The operators' token, as a container prints it."""

from pathlib import Path

import pytest

from halfmoon_runtime.observability.operator_tokens import operator_token
from halfmoon_runtime.print_operator_token import main

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


def test_without_a_key_it_says_that_no_token_is_wanted() -> None:
    with pytest.raises(SystemExit, match="want no token"):
        main()


def test_a_key_that_is_too_short_is_an_error_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY", "short")
    with pytest.raises(SystemExit, match="16 at least"):
        main()


def test_a_file_that_can_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", "/nowhere/cluster-key")
    with pytest.raises(SystemExit, match="/nowhere/cluster-key"):
        main()
