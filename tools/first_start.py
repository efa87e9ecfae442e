"""Start a cluster from a fresh checkout as docs/tour.md says: `python3 tools/first_start.py`.

The page's first command installs what it needs, says what it fetches, starts a cluster, serves the
page and an answer, and ends by Ctrl-C. This runs before anything is installed, so it needs Python's
own library alone. It takes minutes, unless all is installed.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READY = "Ctrl-C stops it"
#: What it says while it installs, one after the other.
INSTALLING = (r"0\.\d GB to fetch", "1 of 3: ", "2 of 3: ", "3 of 3: ", READY)
READY_WITHIN_S = 900.0
ENDS_WITHIN_S = 60.0


def main() -> None:
    """Start, ask, stop, and print how long it took."""
    command = shlex.split(command_of((ROOT / "docs/tour.md").read_text()))
    is_fresh = not (ROOT / ".venv/.installed").exists()
    port = free_port()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        # It gets Ctrl-C as a terminal would send it: to its whole group.
        with output.open("w") as sink:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PORT": str(port)},
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_ready(process, output)
            ready_s = time.monotonic() - began_s
            ask(f"http://127.0.0.1:{port}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            status = ended(process)
        shown = output.read_text()
    if is_fresh:
        check_order(shown, INSTALLING)
    # make ends by the signal that it gets with its children, or with what they ended with.
    if status not in (0, -signal.SIGINT) or "stopping" not in shown:
        sys.exit(f"it ended with {status}:\n{shown}")
    installed = "installed and " if is_fresh else ""
    print(f"{shlex.join(command)}: {installed}ready in {ready_s:.0f} s, answered, stopped")


def command_of(page: str) -> str:
    """Return the page's first command.

    Raises:
        SystemExit: it has none.
    """
    found = re.search(r"^```\n(make up .*)\n```$", page, re.MULTILINE)
    if found is None:
        sys.exit("docs/tour.md does not begin with `make up`")
    return found[1]


def wait_until_ready(process: "subprocess.Popen[bytes]", output: Path) -> None:
    """Wait until the cluster says that it is ready.

    Raises:
        SystemExit: it ended, or did not say so in time.
    """
    deadline_s = time.monotonic() + READY_WITHIN_S
    while READY not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            sys.exit(f"it is not ready:\n{output.read_text()}")
        time.sleep(0.2)


def ended(process: "subprocess.Popen[bytes]") -> int:
    """Return the status that a process ends with; one that does not end leaves nothing behind.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    try:
        return process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def ask(url: str) -> None:
    """Open the page, and read a streamed answer.

    Raises:
        SystemExit: the page is not Halfmoon's, or the answer has no end.
    """
    with urllib.request.urlopen(url, timeout=60) as page:
        if b"<title>Halfmoon" not in page.read():
            sys.exit(f"{url} is not Halfmoon's page")
    body = {"model": "halfmoon-demo", "prompt": "Ada has", "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = answer.read().decode()
    if not events.rstrip().endswith("data: [DONE]") or '"text"' not in events:
        sys.exit(f"no whole answer:\n{events}")


def check_order(shown: str, patterns: tuple[str, ...]) -> None:
    """Check that the patterns are in a text, one after the other.

    Raises:
        SystemExit: one is missing.
    """
    position = 0
    for pattern in patterns:
        found = re.compile(pattern).search(shown, position)
        if found is None:
            sys.exit(f"it did not say {pattern!r} in its turn:\n{shown}")
        position = found.end()


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
