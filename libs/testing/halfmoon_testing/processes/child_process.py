"""Run a module of this library as a process that takes commands: one line in, one line out.

Tests and benchmarks use it as a peer that can be killed.
"""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Self

from halfmoon_sandbox.bound_process import start_bound


class ChildProcess:
    """Control a child process; a context manager that ends it."""

    def __init__(self, module: str, name: str, *arguments: str) -> None:
        """Start a module as a program, with its name as the first argument.

        It is named by its file, and its pipes are ours: so tests can fork it.
        """
        self.name = name
        found = find_spec(module)
        assert found is not None and found.origin is not None
        their_input, commands = os.pipe()
        answers, their_output = os.pipe()
        self._commands = os.fdopen(commands, "w", encoding="utf-8")
        self._answers = os.fdopen(answers, encoding="utf-8")
        with os.fdopen(their_input) as stdin, os.fdopen(their_output, "w") as stdout:
            self._process = start_bound(
                [sys.executable, found.origin, name, *arguments], stdin=stdin, stdout=stdout
            )

    @property
    def pid(self) -> int:
        """Process id, to send signals to."""
        return self._process.pid

    def send(self, command: str) -> None:
        """Send a command without waiting for its answer."""
        self._commands.write(command + "\n")
        self._commands.flush()

    def answer(self) -> str:
        """Read the next line that the process prints, without its line feed."""
        line = self._answers.readline()
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
        self.kill()
        self._answers.close()
        with suppress(BrokenPipeError):  # of a command that it did not take
            self._commands.close()
