"""A conductor's process as it begins, or can't begin."""

import json
import subprocess
import sys

import pytest

from halfmoon_conductor.settings import ConductorSettings


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        (["--host", "127.0.0.7"], "127.0.0.7"),
        (["--host", "0.0.0.0", "--metadata-host", "127.0.0.1"], "127.0.0.1"),
        (["--metadata-host", "127.0.0.0/8"], "127.0.0.1"),
    ],
)
def test_the_embedded_metadata_server_listens_where_it_is_told_or_as_the_rest(
    flags: list[str], address: str
) -> None:
    assert ConductorSettings.from_args(["--model", "m", *flags]).metadata_bind == address


def test_without_a_key_embedded_metadata_stays_on_loopback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in (["--host", "0.0.0.0"], ["--metadata-host", "10.1.2.3"]):
        with pytest.raises(SystemExit):
            ConductorSettings.from_args(["--model", "m", *flags])
        assert f"{flags[0]} (HALFMOON_" in capsys.readouterr().err


#: Runs a conductor, connects to its servers within the very call that reports it as ready, and
#: leaves no time for any task of it.
CONNECT_ONCE_READY = """
import json, os, runpy, socket
from urllib.parse import urlsplit
from halfmoon_runtime import lifecycle

report_stage = lifecycle.report_stage

def connect_once_ready(stage, **fields):
    report_stage(stage, **fields)
    if stage != "ready":
        return
    ends = {}
    for server in ("url", "metadata"):
        where = urlsplit(fields[server])
        try:
            socket.create_connection((where.hostname, where.port)).close()
            ends[server] = "accepted"
        except ConnectionRefusedError:
            ends[server] = "refused"
    print("ENDS", json.dumps(ends), flush=True)
    os._exit(0)

lifecycle.report_stage = connect_once_ready
runpy.run_module("halfmoon_conductor", run_name="__main__")
"""


def test_a_conductor_that_says_it_is_ready_refuses_no_connection() -> None:
    flags = ["--metadata", "embedded", "--model", "fake://tiny", "--metrics-port", "-1"]
    ended = subprocess.run(
        [sys.executable, "-c", CONNECT_ONCE_READY, *flags, "--http-port=0", "--metadata-port=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = [each for each in ended.stdout.splitlines() if each.startswith("ENDS ")]
    assert json.loads(line.removeprefix("ENDS ")) == {"url": "accepted", "metadata": "accepted"}
