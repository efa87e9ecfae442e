"""Keep an engine's program running and ask it for measurements, one at a time."""

import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = Path(__file__).with_name("peers")
_STOP_WITHIN_S = 20.0
#: Clock ticks of /proc per second.
_TICKS = os.sysconf("SC_CLK_TCK")


class RunnerFailed(Exception):
    """A program ended, is late, or could not make a measurement."""


class RunnerProcess:
    """One program of `peers`; as a context manager it is stopped."""

    def __init__(
        self,
        python: Path,
        program: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it.

        Args:
            python: interpreter of its environment.
            program: file name in `peers`.
            settings: its argument.
            environment: all of its environment variables.
            log: gets what it and its libraries print.
        """
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(PROGRAMS / program), json.dumps(settings)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_WITHIN_S if kind is None else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self, within_s: float) -> dict[str, Any]:
        """Wait for its first line.

        Raises:
            RunnerFailed: it ended, or is late.
        """
        return self._line(within_s)

    def ask(self, operation: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """Have it measure something.

        Raises:
            RunnerFailed: with the program's own words where it has any.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps(operation), file=self._process.stdin, flush=True)
        except OSError:
            raise RunnerFailed(self._last_words("it has ended")) from None
        answer = self._line(within_s)
        if "error" in answer:
            raise RunnerFailed(answer["error"])
        return answer

    def processor_s(self) -> float:
        """Return the processor time that it has taken so far; 0 once it has ended."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _line(self, within_s: float) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], within_s)[0]:
            raise RunnerFailed(self._last_words(f"no answer within {within_s:g} s"))
        if not (line := output.readline()):
            raise RunnerFailed(self._last_words("it has ended"))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"{what}; {self._log}: {lines[-1][-300:] if lines else 'empty'}"
