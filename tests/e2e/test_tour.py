"""docs/tour.md, its part with Python: each command is run, and shows what the page says."""

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from halfmoon_engine.native.extension import native_extension
from halfmoon_runtime.observability.operator_tokens import operator_token
from tests.nightly import is_night
from tests.tutorial_page import ROOT, PageReader

pytestmark = pytest.mark.e2e

#: The part with Python. Torch computes the page's answers of 8,000 tokens in minutes: by day they
#: are shorter there, and still long enough to be disturbed.
PAGE = (ROOT / "docs/tour.md").read_text().partition("## With Docker")[0]
if native_extension() is None and not is_night():
    PAGE = PAGE.replace("8000,", "1600,").replace(r"^[4-8]\d{3}$", r"^(?:[8-9]\d\d|1\d{3})$")


def only_of(words: str, up: "subprocess.Popen[bytes] | None") -> str:
    """Kill workers of this cluster alone: others may run on the machine."""
    assert up is not None
    return words.replace("pkill -9 -f", f"pkill -9 -P {up.pid} -f")


@pytest.mark.timeout(480)
@pytest.mark.usefixtures("started_programs")  # the page kills a child of `up` by name
def test_the_commands_of_the_tour_show_what_it_says(tmp_path: Path) -> None:
    assert re.search(r"^```\nmake up .*\n```$", PAGE, re.M)
    with PageReader(PAGE, tmp_path, only_of) as reader:
        assert reader.follow() == PAGE.count("```sh") == 5
        reader.wait_for(r"decode-\d was ended by SIGKILL")
        key = (tmp_path / ".halfmoon/up/cluster-key").read_text().strip()
        bearer = {"authorization": f"Bearer {operator_token(key)}"}
        url = f"http://127.0.0.1:{reader.port}/debug/activity"
        activity = httpx.get(url, headers=bearer).json()
        assert sum(second["placed_again"] for second in activity["seconds"]) >= 1
