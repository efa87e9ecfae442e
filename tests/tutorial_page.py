"""Run a page of the docs as its reader does: the commands of its blocks, in their order.

    ```
    .venv/bin/halfmoon up …      the first terminal: is started, and goes on
    ```

    ```sh
    .venv/bin/halfmoon status    the second terminal: must show what the comment below says
    ```

    <!-- shows: a regular expression -->

Other blocks are not run. Ports of the page are replaced by free ones.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from halfmoon_metadata.tcp_ports import free_port
from halfmoon_sandbox.bound_process import start_bound
from halfmoon_testing.page_steps import PageStep

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$(?:\n+<!-- shows: (.*?) -->$)?", re.M | re.S)
_START = re.compile(r"(?:make|\.venv/bin/halfmoon) up\b")
#: What pages name relative to a clone.
_LINKED = ("examples", "libs")
_WITHIN_S = 240.0


class PageReader:
    """Follow one page in a folder that looks like a clone.

    Args:
        text: the page, or a part of it.
        folder: empty; commands run here.
        adapt: changes commands further, given the process of the cluster.
    """

    def __init__(
        self,
        text: str,
        folder: Path,
        adapt: Callable[[str, "subprocess.Popen[bytes] | None"], str] = lambda words, up: words,
    ) -> None:
        self._blocks = _BLOCK.findall(text)
        self._folder = folder
        self._adapt = adapt
        self.port, self._metadata_port = free_port(), free_port()
        self._output = folder / "output-of-up"
        #: The process of the first terminal; None before it is started.
        self.up: subprocess.Popen[bytes] | None = None
        for name in _LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)

    def __enter__(self) -> "PageReader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.up is None:
            return
        self.up.send_signal(signal.SIGINT)
        status = self.up.wait(60)
        assert status == 0 or error is not None, self._output.read_text()

    def follow(self) -> int:
        """Run all blocks; return how many of the second terminal there are."""
        n_steps = 0
        for language, words, shows in self._blocks:
            if language == "sh":
                assert shows, f"nothing is said of what this shows:\n{words}"
                self._run(words, shows)
                n_steps += 1
            elif _START.match(words):
                self._start(words)
        return n_steps

    def wait_for(self, pattern: str) -> None:
        """Wait until the first terminal shows this."""
        deadline = time.monotonic() + _WITHIN_S
        while not re.search(pattern, self._output.read_text()):
            assert self.up is not None and self.up.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.1)

    def _start(self, words: str) -> None:
        program, _, *given = shlex.split(words)
        if program == "make":
            settings = (word.split("=") for word in given)
            given = [f"--{name.lower()}={value}" for name, value in settings]
        flags = ["--port", str(self.port), "-o", f"conductor.metadata-port={self._metadata_port}"]
        with self._output.open("wb") as sink:
            self.up = start_bound(
                [sys.executable, "-m", "halfmoon_cli", "up", *given, *flags],
                cwd=self._folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for("Ctrl-C stops it")

    def _run(self, words: str, shows: str) -> None:
        ports = {
            "127.0.0.1:8000": f"127.0.0.1:{self.port}",
            "127.0.0.1:7999": f"127.0.0.1:{self._metadata_port}",
        }
        where = {
            "HALFMOON_URL": f"http://127.0.0.1:{self.port}",
            "HALFMOON_METADATA": f"http://127.0.0.1:{self._metadata_port}/metadata",
            "COLUMNS": "120",
        }
        step = PageStep(self._adapt(words, self.up), shows)
        step.run(self._folder, ports, timeout_s=_WITHIN_S, environment={**os.environ, **where})
