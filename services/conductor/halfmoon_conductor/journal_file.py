"""Write the journal of a live conductor to a file: every event with its time and its commands.

``python -m halfmoon_conductor.journal_file PATH`` replays a journal and reports whether a fresh
core returns the same commands.
"""

import sys
from pathlib import Path
from typing import BinaryIO

import structlog

from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.journal import (
    BadJournal,
    encode_entry,
    encode_header,
    replay_journal,
)
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import AnyEvent, Tick

log = structlog.get_logger()


class JournalFile:
    """Append the core's calls to a new file until it is full.

    A crash loses at most one tick's entries.
    """

    def __init__(self, path: Path, config: SchedulingConfig, *, max_bytes: int) -> None:
        """Begin a journal. Rename an existing one to ``….previous``.

        Raises:
            OSError: the file can't be written.
        """
        if path.exists():
            path.replace(path.with_name(path.name + ".previous"))
        path.touch(0o600)
        self._path = path
        self._max_bytes = max_bytes
        self._file: BinaryIO | None = path.open("wb")
        self._n_bytes = self._file.write(encode_header(config))
        self._file.flush()

    def record(self, now: float, event: AnyEvent, commands: list[AnyCommand]) -> None:
        """Append one call of the core. A full journal, or a full disk, ends the journal."""
        if self._file is None:
            return
        entry = encode_entry(now, event, commands)
        if self._n_bytes + len(entry) > self._max_bytes:
            log.warning("journal_full", path=str(self._path), max_bytes=self._max_bytes)
            self.close()
            return
        try:
            self._n_bytes += self._file.write(entry)
            if isinstance(event, Tick):
                self._file.flush()
        except OSError as error:
            log.error("journal_ended", path=str(self._path), reason=str(error))
            self._file = None

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def main(arguments: list[str]) -> int:
    """Replay a journal; 0 if all agrees, 1 if something differs, 2 if it can't be read."""
    if len(arguments) != 1:
        print("usage: python -m halfmoon_conductor.journal_file PATH", file=sys.stderr)
        return 2
    try:
        with Path(arguments[0]).open("rb") as source:
            n_same, difference = replay_journal(source)
    except (OSError, BadJournal) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    if difference is None:
        print(f"{n_same} entries, the same commands")
        return 0
    print(f"entry {difference.number} differs, at {difference.entry.now:.6f} s")
    print(f"  event    {difference.entry.event}")
    print(f"  recorded {list(difference.entry.commands)}")
    print(f"  replayed {list(difference.actual)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
