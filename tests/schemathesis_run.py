"""Send requests that schemathesis generates from an OpenAPI document to a live server.

Right requests must be taken, wrong ones refused, and each answer be one that the document names.
What schemathesis finds is printed with the seed that repeats it.
"""

import os
import subprocess
import sys
from pathlib import Path

SCHEMA = Path(__file__).resolve().parents[1] / "libs" / "protocol" / "schema"
#: Requests for each operation and kind; more find little more.
_EXAMPLES = 30
_LIMIT_S = 280


def run_schemathesis(document: str, url: str, folder: Path, *, seed: int, config: str = "") -> None:
    """Fail with schemathesis' report if it finds anything.

    Args:
        document: name of the file in libs/protocol/schema.
        url: of the server.
        folder: for what it writes.
        seed: draws the requests; in CI, where luck is to hold up no change, they are the same ones.
        config: in TOML, of parameters and of statuses that a schema can't tell from the request.
    """
    drawn = 1 if os.environ.get("CI") else seed
    path = folder / "schemathesis.toml"
    path.write_text(config)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(path)),
            *("run", str(SCHEMA / document), "--url", url),
            *("--phases", "coverage,fuzzing", "--max-examples", str(_EXAMPLES)),
            *("--seed", str(drawn), "--continue-on-failure", "--warnings", "off", "--no-shrink"),
            *("--output-sanitize", "false", "--generation-database", "none"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, f"seed {drawn}:\n{done.stdout}{done.stderr}"
    assert "0 failures" in done.stdout or "No issues found" in done.stdout, done.stdout
