"""Where the cluster key comes from: its variable, or a file that is no other user's to read."""

import logging
import os
from pathlib import Path

import pytest

from halfmoon_metadata.cluster_key_source import ClusterKeyError, cluster_key_from_environment

KEY = "the moon is made of green cheese"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster-key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def from_file(path: Path) -> str:
    return cluster_key_from_environment({"HALFMOON_CLUSTER_KEY_FILE": str(path)})


def test_a_key_comes_from_variable_or_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_key_from_environment({}) == ""
    assert cluster_key_from_environment({"HALFMOON_CLUSTER_KEY_FILE": ""}) == ""
    assert cluster_key_from_environment({"HALFMOON_CLUSTER_KEY": KEY}) == KEY
    assert from_file(file) == KEY
    monkeypatch.delenv("HALFMOON_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("HALFMOON_CLUSTER_KEY_FILE", str(file))
    assert cluster_key_from_environment() == KEY, "this process's own"


def test_both_variables_are_an_error_that_names_both_and_no_key(file: Path) -> None:
    with pytest.raises(ClusterKeyError) as refused:
        cluster_key_from_environment(
            {"HALFMOON_CLUSTER_KEY": KEY, "HALFMOON_CLUSTER_KEY_FILE": str(file)}
        )
    assert "HALFMOON_CLUSTER_KEY and HALFMOON_CLUSTER_KEY_FILE" in str(refused.value)
    assert "cheese" not in str(refused.value)


def test_a_file_of_ours_that_others_may_read_or_change_is_refused(
    file: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"  # is as open as its file
    link.symlink_to(file)
    for mode in (0o640, 0o604, 0o620, 0o602, 0o644, 0o666):
        file.chmod(mode)
        with pytest.raises(ClusterKeyError, match=rf"mode {mode:04o}\): run `chmod 600 {file}`"):
            from_file(file)
        with pytest.raises(ClusterKeyError, match="chmod 600"):
            from_file(link)
        file.chmod(0o600)
        assert from_file(file) == from_file(link) == KEY


class _ReadOnly:
    f_flag = os.ST_RDONLY


def test_on_a_read_only_mount_access_is_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test can't mount; the answer of the system is put in its place."""
    file.chmod(0o444)
    monkeypatch.setattr(os, "fstatvfs", lambda _: _ReadOnly)
    assert from_file(file) == KEY


def test_a_file_of_another_user_is_used_with_a_warning_if_all_may_read_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    file.chmod(0o640)
    with caplog.at_level(logging.WARNING):
        assert from_file(file) == KEY
        assert not caplog.records
        file.chmod(0o644)
        assert from_file(file) == KEY
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "cheese" not in caplog.text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"\xff\xfe" * 20, "no text in UTF-8"),
        (b"x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_a_file_without_a_key_is_no_open_cluster(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ClusterKeyError, match=f"{file}.*{reason}"):
        from_file(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterKeyError, match=r"missing.*can't be read: No such file"):
        from_file(tmp_path / "missing")
    with pytest.raises(ClusterKeyError, match="can't be read"):
        from_file(tmp_path)
