"""Read a user's lines, with editing and a kept history, and parse them.

Only its owner can read the history file.
"""

import contextlib
import os
from pathlib import Path

import msgspec

try:
    import readline
except ImportError:  # pragma: no cover - some Python builds come without it
    readline = None  # type: ignore[assignment]

_KEPT_LINES = 1000


class SlashCommand(msgspec.Struct, frozen=True):
    """A line that starts with a slash."""

    name: str
    rest: str = ""


#: Commands of a line: name, argument, and effect.
SLASH_COMMANDS = (
    ("help", "", "this list"),
    ("again", "", "ask the last question once more: what is cached now is not computed again"),
    ("file", "PATH", "send a file's text with the next message"),
    ("system", "TEXT", "set the system prompt; without TEXT: show it; /system - removes it"),
    ("reset", "", "forget the conversation, keep the system prompt"),
    ("save", "PATH", "write the conversation as JSON, as /v1/chat/completions takes it"),
    ("quit", "", "leave, as Ctrl-D does"),
)


def parse_line(line: str) -> SlashCommand | str:
    """Return the command of a line, or its words for the model.

    Two slashes at the start are words that begin with one.
    """
    if line.startswith("//"):
        return line[1:]
    if line.startswith("/"):
        name, _, rest = line[1:].partition(" ")
        return SlashCommand(name.strip(), rest.strip())
    return line


def help_text() -> str:
    """Return the list of commands, a line each."""
    rows = [(f"/{name} {what}".strip(), does) for name, what, does in SLASH_COMMANDS]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {does}" for left, does in rows]
    return "\n".join(
        [*lines, "A line that ends with \\ goes on in the next. Ctrl-C stops an answer."]
    )


class LineReader:
    """Reads lines from the terminal; as a context manager it loads and keeps the history."""

    def __init__(self, history: Path | None, prompt: str) -> None:
        self._history = history
        self._prompt = prompt

    def __enter__(self) -> "LineReader":
        if readline is not None and self._history is not None:
            with contextlib.suppress(OSError):
                readline.read_history_file(self._history)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if readline is None or self._history is None:
            return
        readline.set_history_length(_KEPT_LINES)
        # A history that can't be kept is no reason to end badly.
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)

    def read(self) -> str:
        r"""Read the next line, and those that follow while each ends with ``\``.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        line = input(self._prompt)
        lines = [line.removesuffix("\\")]
        while line.endswith("\\"):
            line = input("  ")
            lines.append(line.removesuffix("\\"))
        return "\n".join(lines)


def history_path() -> Path:
    """Return the path of the history file, in XDG's folder for state."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "halfmoon" / "chat_history"
