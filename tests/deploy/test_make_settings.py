"""A misspelt setting of `make up` ends it with the nearest one, before anything is installed."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_type_hints

import pytest

from halfmoon_cli.up.up_command import up

ROOT = Path(__file__).parents[2]


def make(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run make with our Makefile in a folder where nothing could be installed."""
    (folder / "tools").mkdir()
    for name in ("Makefile", "tools/make_settings.py"):
        shutil.copy(ROOT / name, folder / name)
    # A make that runs the tests has told its own variables.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *words], cwd=folder, env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("PREFIL=2", "PREFIL is no setting of make up: did you mean PREFILL?"),
        ("decode=2", "decode is no setting of make up: did you mean DECODE?"),
        ("PREFILL=2|MODEL=a b'c|KVSTRE+=3", "KVSTRE is no setting of make up: did you mean"),
        ("HF_HOME=/tmp", "A variable for another program goes first: HF_HOME=… make up"),
    ],
)
def test_what_is_no_setting_ends_make_up(tmp_path: Path, words: str, told: str) -> None:
    ended = make(tmp_path, "up", *words.split("|"))
    assert ended.returncode == 2
    assert told in ended.stderr.splitlines()[0]
    assert not (tmp_path / ".venv").exists()


def test_settings_of_any_value_and_settings_of_services_pass(tmp_path: Path) -> None:
    given = ["MODEL=my -- PREFIL=1 'model'", "PORT:=9000", "TORCH=cpu", "HALFMOON_CHUNK_TOKENS=9"]
    ended = make(tmp_path, "-s", ".up-settings-are-known", *given)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_make_up_has_the_settings_that_halfmoon_up_reads_from_the_environment() -> None:
    hints = get_type_hints(up, include_extras=True)
    options = [each.__metadata__[0] for each in hints.values() if hasattr(each, "__metadata__")]
    read = {str(each.envvar) for each in options if each.envvar}
    (line,) = re.findall(r"^UP_SETTINGS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert {each for each in read if not each.startswith("HALFMOON_")} == set(line.split())
