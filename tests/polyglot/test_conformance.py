"""The services in TypeScript pass the kit, with a cluster key and without."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed_programs import needs_programs
from tests.polyglot.conftest import ROOT

COMMANDS = {
    "kvstore": ["--capacity-mib", "16"],
    "decode": ["--capacity-mib", "8", "--block-size", "16", "--landing-ttl-s", "25",
               "--model", str(ROOT / "libs/engine/halfmoon_engine/demo/model")],
}  # fmt: skip


@needs_programs("node")
@pytest.mark.e2e
@pytest.mark.parametrize("key", ["--no-key", "--key"])
@pytest.mark.parametrize("role", COMMANDS)
def test_a_service_in_typescript_passes_every_check(program: Path, role: str, key: str) -> None:
    service = ["node", str(program / role / "main.js"), "--metadata", "{metadata}"]
    service += ["--worker-id", "{worker_id}", *COMMANDS[role]]
    ran = subprocess.run(
        [sys.executable, "-m", "halfmoon_cli", "conform", role, key, "--", *service],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
