"""`halfmoon p2p` as a user runs it: folders between processes, listed and removed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon_cli.__main__ import app

FILES = {"config.json": b"{}", "weights/part-1.safetensors": bytes(range(256)) * 12_345}
PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    for label, data in FILES.items():
        (folder / label).parent.mkdir(parents=True, exist_ok=True)
        (folder / label).write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def p2p(metadata_url: str, *words: str) -> tuple[int, str]:
    """A command, run here to its end: its exit status and what it printed."""
    done = CliRunner().invoke(app, ["p2p", *words], env={"HALFMOON_METADATA": metadata_url})
    return done.exit_code, done.output


@contextmanager
def serving(metadata_url: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "halfmoon_cli", "p2p", *words],
        env={**os.environ, "COLUMNS": "200", "HALFMOON_METADATA": metadata_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, f"it ended without {text!r}: {seen}"
        seen += line


def test_a_folder_goes_from_hand_to_hand(metadata_url: str, folder: Path, tmp_path: Path) -> None:
    with serving(metadata_url, "put", "model", str(folder)) as publisher:
        read_until(publisher, "offering model: 2 files")
        second = ("get", "model", str(tmp_path / "second"), "--serve")
        with serving(metadata_url, *second) as replica:
            read_until(replica, "checksums right")
            status, listing = p2p(metadata_url, "ls")
            assert (status, listing.split()[-6:]) == (
                0,
                ["model", "2", "3.2", "MB", "1", "1", "0"][-6:],
            )
            publisher.send_signal(signal.SIGINT)
            assert publisher.wait(PATIENCE_S) == 0
            status, text = p2p(metadata_url, "get", "model", str(tmp_path / "third"))
            assert (status, "from 1 sources, checksums right" in text) == (0, True), text
            assert p2p(metadata_url, "rm", "model") == (0, "removed model\n")
            read_until(replica, "model was removed")
            assert replica.wait(PATIENCE_S) == 0
    assert contents(tmp_path / "second") == contents(tmp_path / "third") == FILES
    assert p2p(metadata_url, "ls")[1].split()[-1] == "part"


def test_serving_ends_with_its_time_and_takes_the_record_along(
    metadata_url: str, folder: Path
) -> None:
    assert p2p(metadata_url, "put", "model", str(folder), "--for-seconds", "0.1")[0] == 0
    assert "model" not in p2p(metadata_url, "ls")[1]


def test_what_can_not_be_had_is_one_line(metadata_url: str, folder: Path, tmp_path: Path) -> None:
    status, text = p2p(metadata_url, "get", "[nothing]", str(tmp_path / "got"))
    assert (status, text) == (
        2,
        "halfmoon: there is no object [nothing] in the metadata store\n",
    )
    status, text = p2p(metadata_url, "rm", "nothing")
    assert (status, text) == (2, "halfmoon: there is no object nothing\n")
    status, text = p2p("gopher://x", "ls")
    assert (status, "has no known scheme" in text) == (2, True)
    assert not (tmp_path / "got").exists()
    assert contents(folder) == FILES
