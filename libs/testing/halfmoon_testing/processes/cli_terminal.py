"""Run a `halfmoon` command on a terminal that a test types into and reads from."""

import contextlib
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


class CliTerminal:
    """Type into a program's terminal, and read its new output."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seen = ""

    def until(self, words: str, within_s: float = 120) -> str:
        """Wait for these words, and return the output up to and including them.

        Raises:
            AssertionError: the words did not come.
        """
        deadline = time.monotonic() + within_s
        while words not in self._seen:
            assert time.monotonic() < deadline, f"no {words!r} in {self._seen!r}"
            self._read()
        end = self._seen.index(words) + len(words)
        seen, self._seen = self._seen[:end], self._seen[end:]
        return seen

    def type(self, keys: str) -> None:
        """Type these keys."""
        os.write(self._fd, keys.encode())

    def interrupt(self, words: str, within_s: float = 120) -> str:
        """Type Ctrl-C until these words are shown.

        Ctrl-C discards keys that were not read yet. A Ctrl-C just before readline waits for keys
        is lost: earlier input must have been shown before.
        """
        deadline = time.monotonic() + within_s
        while words not in self._seen:
            assert time.monotonic() < deadline, f"no {words!r} in {self._seen!r}"
            self.type("\x03")
            patience = time.monotonic() + 10
            while words not in self._seen and time.monotonic() < patience:
                self._read()
        return self.until(words)

    def ask(self, line: str) -> str:
        """Type a line, and return the output up to the next prompt."""
        self.type(line + "\n")
        # The line's own echo ends with a line feed.
        self.until("\n")
        return self.until("> ")

    @property
    def unread(self) -> str:
        """Output that no test has read."""
        return self._seen

    def drain(self) -> None:
        """Read the output of the next moment, if there is any."""
        with contextlib.suppress(AssertionError):
            self._read()

    def _read(self) -> None:
        if not select.select([self._fd], [], [], 0.1)[0]:
            return
        try:
            self._seen += os.read(self._fd, 1 << 16).decode(errors="replace")
        except OSError as error:
            raise AssertionError(f"it ended: {self._seen!r}") from error


@contextmanager
def run_on_terminal(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    end: str,
    within_s: float = 120,
) -> Iterator[CliTerminal]:
    """Run `halfmoon` with these arguments; `end` is typed last, and must end it with status 0.

    Raises:
        AssertionError: the command ended otherwise.
    """
    command = [sys.executable, "-m", "halfmoon_cli", *arguments]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "300", **(environment or {})}
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, variables)
    status: int | None = None
    try:
        terminal = CliTerminal(fd)
        yield terminal
        terminal.type(end)
        deadline = time.monotonic() + within_s
        while status is None:
            assert time.monotonic() < deadline, f"it did not end: {terminal.unread!r}"
            # Unread output would keep it from ending.
            terminal.drain()
            found, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if found else None
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(fd)
    assert status == 0, f"it ended with {status}"
