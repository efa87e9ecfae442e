"""Run a module of this library as a process that takes commands: one line in, one line out.

Tests and benchmarks use it as a peer that can be killed.
"""

import subprocess
import sys
from typing import Self

from halfmoon_sandbox.bound_process import start_bound


class ChildProcess:
    """Control a child process; a context manager that ends it."""

    def __init__(self, module: str, name: str, *arguments: str) -> None:
        """Start a module as a program, with its name as the first argument."""
        self.name = name
        self._process = start_bound(
            [sys.executable, "-m", module, name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id, to send signals to."""
        return self._process.pid

    def send(self, command: str) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Read the next line that the process prints, without its line feed."""
        assert self._process.stdout is not None
        line: str = self._process.stdout.readline()
        assert line, f"process {self.name} ended with {self._process.wait()}"
        return line.removesuffix("\n")

    def ask(self, command: str) -> str:
        """Send a command and return its answer."""
        self.send(command)
        return self.answer()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
