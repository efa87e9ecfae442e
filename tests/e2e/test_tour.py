"""docs/tour.md, its part with Python: each command is run, and shows what the page says."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_runtime.observability.operator_http import operator_token
from halfmoon_testing.page_steps import read_steps

pytestmark = pytest.mark.e2e

#: The part with Python.
PAGE = (Path(__file__).parents[2] / "docs/tour.md").read_text().partition("## With Docker")[0]


def wait_until_printed(pattern: str, output: Path, up: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while not re.search(pattern, output.read_text()):
        assert up.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_the_commands_of_the_tour_show_what_it_says(tmp_path: Path) -> None:
    start = re.search(r"^```\nmake up (.*)\n```$", PAGE, re.M)
    assert start is not None
    settings = dict(word.split("=") for word in shlex.split(start[1]))
    port = free_port()
    flags = [f"--{name.lower()}={value}" for name, value in settings.items()]
    output = tmp_path / "output"
    with output.open("wb") as sink:
        up = subprocess.Popen(
            [sys.executable, "-m", "halfmoon_cli", "up", *flags, "--port", str(port)],
            cwd=tmp_path,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_printed("Ctrl-C stops it", output, up)
        words = {
            "127.0.0.1:8000": f"127.0.0.1:{port}",
            ".venv/bin/halfmoon status": (
                f"{sys.executable} -m halfmoon_cli status --url http://127.0.0.1:{port}"
            ),
            # Only workers of this cluster: others may run on the machine.
            "pkill -9 -f": f"pkill -9 -P {up.pid} -f",
        }
        steps = read_steps(PAGE)
        assert len(steps) == 5
        for step in steps:
            step.run(tmp_path, words)
        wait_until_printed(r"decode-\d was ended by SIGKILL", output, up)
        key = (tmp_path / ".halfmoon/up/cluster-key").read_text().strip()
        bearer = {"authorization": f"Bearer {operator_token(key)}"}
        activity = httpx.get(f"http://127.0.0.1:{port}/debug/activity", headers=bearer).json()
        assert sum(second["placed_again"] for second in activity["seconds"]) >= 1
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
