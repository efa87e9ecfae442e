"""Run the commands of a page of the docs, and check that they show what the page says.

A step is a block that begins with ```sh, and the comment behind it: ``<!-- shows: PATTERN -->``.
The pattern is searched in what a terminal would show, lines of standard error included.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FENCE = "```sh\n"
_STEP = re.compile(r"^```sh\n(.*?)^```\n+<!-- shows: (.*?) -->$", re.M | re.S)


@dataclass(frozen=True)
class PageStep:
    """One block of commands, and the pattern of what it shows."""

    commands: str
    shows: str

    def run(
        self,
        folder: Path,
        words: Mapping[str, str],
        *,
        timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run the commands in a folder, and return what they show.

        Args:
            folder: where they run, and write files.
            words: what is put in place of words of the page, such as a port that may be taken.
            timeout_s: the longest they may take.
            environment: all variables of the shell; None: those of this process.

        Raises:
            AssertionError: what they show does not match the pattern.
            TimeoutExpired: they take longer.
        """
        commands = self.commands
        for word, replacement in words.items():
            commands = commands.replace(word, replacement)
        shown = subprocess.run(
            ["bash", "-c", commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        ).stdout
        assert re.search(self.shows, shown, re.M), (
            f"{commands}\ndoes not show {self.shows}:\n{shown}"
        )
        return shown


def read_steps(page: str) -> list[PageStep]:
    """Return the steps of a page in order.

    Raises:
        AssertionError: a block has no pattern behind it.
    """
    steps = [PageStep(commands, shows) for commands, shows in _STEP.findall(page)]
    assert len(steps) == page.count(_FENCE), (
        "a block of commands has no <!-- shows: … --> behind it"
    )
    assert all(_FENCE not in step.commands for step in steps)
    return steps
