"""Find the tested worker's record and segment, and start, kill and restart its process.

A subject is started by a command, whose placeholders are filled in, or is running already. Only a
started one can be killed.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from halfmoon_conform.verdict import CheckFailed, CheckSkipped
from halfmoon_metadata.store_interface import MetadataStore
from halfmoon_sandbox.bound_process import start_bound

#: Seconds for a service to start and register, a model's load included.
START_S = 120.0
_POLL_S = 0.05
#: Seconds for a process to end by a signal that asks it to.
_STOP_S = 60.0
_LOG_LINES = 15
#: A name in braces, unless a shell is to fill it in.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
#: Seconds without a record after which a person is told what is waited for.
_TELL_AFTER_S = 15.0


class CannotStartSubject(Exception):
    """The command brought up no service; the text says what was missing, and its last lines."""


class SubjectProcess:
    """A process that a command starts, in a group of its own; it ends with the kit."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._command, self._env = command, env
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, its output in the log file.

        Raises:
            CannotStartSubject: there is no such program.
        """
        with self.log.open("ab") as out:
            try:
                self._process = start_bound(
                    self._command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._env},
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotStartSubject(f"can't start {self._command[0]!r}: {error}") from None

    @property
    def exit_status(self) -> int | None:
        """Status of the ended process; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        """Return whether there is a process."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and what it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def kill(self) -> None:
        """End it at once, as a crash would."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> None:
        """Ask it to end, and kill it when it does not."""
        if not self.running:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended(), _STOP_S)
        except TimeoutError:
            await self.kill()

    async def ended(self) -> None:
        """Wait until the process is over."""
        while self.running:  # noqa: ASYNC110 (a process of ours is polled)
            await asyncio.sleep(_POLL_S)

    def last_lines(self) -> str:
        """Return the end of its output."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n    ".join(lines[-_LOG_LINES:])


class Subject:
    """The tested worker as its records describe it."""

    def __init__(
        self,
        worker_id: str,
        store: MetadataStore,
        cluster_key: str = "",
        process: SubjectProcess | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.store = store
        self.cluster_key = cluster_key
        self.process = process
        #: The record as it was last read.
        self.record: dict[str, Any] = {}
        #: Says what was asked of the metadata server, if the kit serves that.
        self.describe_requests: Callable[[], str] = str
        #: Gets a line when a start takes long.
        self.on_wait: Callable[[str], None] = lambda _: None

    @property
    def generation(self) -> int:
        """The subject's generation as it was last read."""
        return int(self.record.get("generation", 0))

    @property
    def killable(self) -> bool:
        """Return whether the kit started it."""
        return self.process is not None

    async def start(self) -> None:
        """Start the process if it does not run, and wait for a record of a higher generation.

        Raises:
            CannotStartSubject: it ended, or registers nothing in time.
        """
        before = self.generation
        if self.process is not None and not self.process.running:
            self.process.start()
        told = asyncio.get_running_loop().call_later(_TELL_AFTER_S, self._tell_what_is_missing)
        try:
            await asyncio.wait_for(self._wait_for_record(above=before), START_S)
        except TimeoutError:
            raise CannotStartSubject(
                f"no record {member_key(self.worker_id)!r} within {START_S:g} s: does the service "
                "use the metadata server and the worker id that it was given? "
                f"{self.describe_requests()} {self._tail()}"
            ) from None
        finally:
            told.cancel()

    async def restart(self) -> None:
        """Start the process again after it ended.

        Raises:
            CheckFailed: it does not come back.
        """
        try:
            await self.start()
        except CannotStartSubject as error:
            raise CheckFailed(f"does not start again: {error}") from None

    async def kill(self) -> None:
        """Kill it, as a crash would.

        Raises:
            CheckSkipped: the kit did not start it.
        """
        await self._own_process().kill()

    async def ask_to_stop(self) -> None:
        """Ask the process to end by SIGTERM; return at once.

        Raises:
            CheckSkipped: the kit did not start it.
        """
        self._own_process().signal(signal.SIGTERM)

    async def read_record(self) -> dict[str, Any] | None:
        """Read the record anew; None when there is none."""
        raw = await asyncio.to_thread(self.store.get, member_key(self.worker_id))
        if raw is None:
            return None
        try:
            self.record = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise CheckFailed(f"its record is no JSON: {error}") from None
        return self.record

    async def segment(self) -> dict[str, Any]:
        """Read the record of its segment.

        Raises:
            CheckFailed: there is none.
        """
        raw = await asyncio.to_thread(self.store.get, f"halfmoon/segments/{self.worker_id}")
        if raw is None:
            raise CheckFailed(f"no record halfmoon/segments/{self.worker_id}")
        segment: dict[str, Any] = msgspec.json.decode(raw)
        return segment

    def _tell_what_is_missing(self) -> None:
        self.on_wait(
            f"waiting for the record {member_key(self.worker_id)!r}, {START_S:g} s at the most. "
            f"{self.describe_requests()}"
        )

    def _own_process(self) -> SubjectProcess:
        if self.process is None:
            raise CheckSkipped("the kit did not start the subject, so it can't stop it")
        return self.process

    async def _wait_for_record(self, *, above: int) -> None:
        while True:
            if self.process is not None and not self.process.running:
                raise CannotStartSubject(
                    f"the command ended with status {self.process.exit_status}. {self._tail()}"
                )
            if (await self._record_above(above)) is not None:
                return
            await asyncio.sleep(_POLL_S)

    async def _record_above(self, generation: int) -> dict[str, Any] | None:
        raw = await asyncio.to_thread(self.store.get, member_key(self.worker_id))
        record = None if raw is None else msgspec.json.decode(raw)
        if record is None or record.get("generation", 0) <= generation:
            return None
        self.record = record
        return self.record

    def _tail(self) -> str:
        if self.process is None:
            return ""
        return f"Its output ends with:\n    {self.process.last_lines()}"


def member_key(worker_id: str) -> str:
    """Return the key of a worker's record."""
    return f"halfmoon/members/{worker_id}"


def fill_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace the placeholders of a command, such as `{metadata}`.

    Raises:
        CannotStartSubject: a placeholder is none of these; the text names it and all others.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in values:
            there = ", ".join(f"{{{name}}}" for name in values)
            raise CannotStartSubject(f"no placeholder {found[0]}; there are {there}")
        return values[found[1]]

    return [_PLACEHOLDER.sub(value_of, word) for word in command]
