"""A process of this library's that is ordered about by lines: one in, one out.

For tests and benchmarks that need a peer which can be killed.
"""

import subprocess
import sys
from typing import Self


class ChildProcess:
    """The parent's handle; a context manager that ends the process."""

    def __init__(self, module: str, name: str, *arguments: str) -> None:
        """Start a module as a program, with its name as the first argument."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """To send it signals."""
        return self._process.pid

    def send(self, command: str) -> None:
        """One command; it is carried out while the caller does something else."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """The next line that it prints, without its end."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"process {self.name} ended with {self._process.wait()}"
        return line.removesuffix("\n")

    def ask(self, command: str) -> str:
        """A command and its answer."""
        self.send(command)
        return self.answer()

    def kill(self) -> None:
        """As abruptly as can be; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
