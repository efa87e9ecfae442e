"""A user's mistake is answered by one line that names it and the way out, without a traceback."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound
from tests.e2e.redis_server import RedisServer
from tests.installed_programs import needs_programs
from tests.programs import run_program

pytestmark = pytest.mark.e2e


class Mistake(NamedTuple):
    """A command line, with {port} for a port that is taken, and what is said of it."""

    words: str
    told: str
    status: int = 2


CONDUCTOR = "conductor --model fake://moon --metadata embedded --metadata-port {free2} --http-port"
KVSTORE = "kvstore --metadata memory://mistakes"
DECODE = "decode --model fake://moon --metadata memory://mistakes"
MISTAKES = [
    Mistake(f"{CONDUCTOR} {{port}}", "http_port {port} on 127.0.0.1 can't be had", 1),
    Mistake(
        "conductor --model fake://moon --metadata embedded --http-port {free} --metadata-port"
        " {port}",
        "or choose another with --metadata-port",
        1,
    ),
    Mistake(f"{KVSTORE} --metrics-port {{port}}", "choose another with --metrics-port", 1),
    Mistake(f"{CONDUCTOR} {{free}} --tenants nowhere.toml", "tenants file nowhere.toml"),
    Mistake(f"{CONDUCTOR} {{free}} --tenants broken.toml", "tenants file broken.toml: Invalid"),
    Mistake(
        f"{CONDUCTOR} {{free}} --journal-path file/a", "journal_path 'file/a' can't be written"
    ),
    Mistake("decode --model fake://moon --metadata foo://x", "'foo://x' has no known scheme"),
    Mistake("kvstore --metadata foo://x", "'foo://x' has no known scheme"),
    Mistake(f"{KVSTORE} --disk-path file", "disk_path 'file' can't be used; name a folder"),
    Mistake(f"{KVSTORE} --disk-path . --disk-mib 99999999", "is more than the"),
    Mistake(f"{KVSTORE} --capacity-mib 99999999", "capacity_mib 99999999 can't be had", 1),
    Mistake(f"{DECODE} --pool-mib 99999999", "can't be had; ask for less: Cannot allocate", 1),
    Mistake("decode --model ./modle --metadata memory://x", "modle is not a folder"),
    Mistake(
        "decode --model lab/no-such --metadata memory://x",
        "'lab/no-such' is not a folder here, and as a hub id it can't be fetched",
    ),
    Mistake(
        "kvstore --metadata redis://127.0.0.1/0?password_file=nowhere",
        "password_file 'nowhere' can't be read: No such file",
    ),
    Mistake(f"{KVSTORE} --tls-cert nowhere --tls-key nowhere", "tls_cert 'nowhere' can't be read"),
]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.timeout(180)
def test_each_mistake_is_one_line(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken.toml").write_text("a = [")
    no_hub = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    for mistake in MISTAKES:
        ports = {"port": taken_port, "free": free_port(), "free2": free_port()}
        service, *words = mistake.words.format(**ports).split()
        ended = run_program(f"halfmoon_{service}", *words, joined=True, cwd=tmp_path, env=no_hub)
        told = mistake.told.format(port=taken_port)
        assert "Traceback" not in ended.stdout, ended.stdout
        assert told in ended.stdout.splitlines()[-1], (told, ended.stdout)
        assert ended.returncode == mistake.status, ended.stdout


@needs_programs("redis-server")
@pytest.mark.parametrize("role", ["conductor", "prefill", "decode", "kvstore"])
def test_a_service_whose_metadata_server_is_away_names_it_and_joins_once_it_is_there(
    tmp_path: Path, role: str
) -> None:
    redis = RedisServer(tmp_path)
    redis.kill()
    log = tmp_path / "log"
    own = {
        "conductor": ["--model", "fake://moon", "--http-port", str(free_port())],
        "prefill": ["--model", "fake://moon", "--pool-mib", "8"],
        "decode": ["--model", "fake://moon", "--pool-mib", "8"],
        "kvstore": ["--capacity-mib", "1"],
    }
    words = ["--metadata", redis.url, "--metrics-port", "-1", *own[role]]
    with log.open("wb") as sink:
        process = start_bound(
            [sys.executable, "-m", f"halfmoon_{role}", *words],
            stdout=sink,
            stderr=subprocess.STDOUT,
        )

    def line_with(event: str) -> str:
        deadline = time.monotonic() + 120
        while not (found := [each for each in log.read_text().splitlines() if event in each]):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        return found[0]

    try:
        away = line_with("metadata server is away, still trying")
        assert redis.url in away and "Connection refused" in away
        redis.start()
        line_with("metadata server is back")
        line_with("ready")
    finally:
        process.kill()
        process.wait(20)
        redis.kill()
