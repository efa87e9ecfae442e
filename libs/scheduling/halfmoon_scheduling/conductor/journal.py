"""Write the events and commands of the core to a journal, and replay one to compare decisions.

    journal = "halfmoon journal 1\\n" | record of Header | record of Entry | …
    record  = u32 little-endian length | MessagePack

The core has no clock and no dice, so a fresh core that handles the same events at the same times
returns the same commands. Where it does not, its decisions have changed since the journal was
written, or depend on something besides the events. Tokens are zeros (`journal_redaction`).
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.conductor.journal_redaction import redact
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import AnyEvent

MAGIC = b"halfmoon journal 1\n"
#: The longest record: a prompt of a million tokens fits.
MAX_RECORD_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class BadJournal(ValueError):
    """Not a journal of this version; the text says what was read instead."""


class JournalHeader(msgspec.Struct, frozen=True):
    """The configuration of the core that the journal is of."""

    config: SchedulingConfig


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """One call of `Conductor.handle`."""

    now: float
    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first entry at which a replay returned other commands."""

    #: Counts entries from 0.
    number: int
    entry: JournalEntry
    actual: tuple[AnyCommand, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(JournalHeader)
_entry_decoder = msgspec.msgpack.Decoder(JournalEntry)


def encode_header(config: SchedulingConfig) -> bytes:
    """Return the beginning of a journal."""
    return MAGIC + _record(JournalHeader(config))


def encode_entry(now: float, event: AnyEvent, commands: list[AnyCommand]) -> bytes:
    """Return the record of one call of `Conductor.handle`, without what prompts and answers say."""
    redacted = tuple([redact(command) for command in commands])
    return _record(JournalEntry(now, redact(event), redacted))


def read_journal(source: BinaryIO) -> tuple[JournalHeader, Iterator[JournalEntry]]:
    """Read a journal's header, and its entries one at a time.

    A truncated record ends the journal: its writer was killed.

    Raises:
        BadJournal: not a journal; or, from the iterator, a record that can't be read.
    """
    if source.read(len(MAGIC)) != MAGIC:
        raise BadJournal(f"a journal begins with {MAGIC!r}, this does not")
    first = _read_record(source)
    if first is None:
        raise BadJournal("the journal ends before its header does")
    try:
        header = _header_decoder.decode(first)
    except msgspec.DecodeError as error:
        raise BadJournal(f"its header can't be read: {error}") from None
    return header, _entries(source)


def replay_journal(source: BinaryIO) -> tuple[int, ReplayDifference | None]:
    """Replay a journal; return how many entries agree, and the first that does not.

    Raises:
        BadJournal: as `read_journal`.
    """
    header, entries = read_journal(source)
    core = Conductor(header.config)
    number = 0
    for number, entry in enumerate(entries, start=1):
        actual = tuple(core.handle(entry.event, entry.now))
        if actual != entry.commands:
            return number - 1, ReplayDifference(number - 1, entry, actual)
    return number, None


def _record(data: JournalHeader | JournalEntry) -> bytes:
    encoded = _encoder.encode(data)
    return _LENGTH.pack(len(encoded)) + encoded


def _entries(source: BinaryIO) -> Iterator[JournalEntry]:
    while (record := _read_record(source)) is not None:
        try:
            yield _entry_decoder.decode(record)
        except msgspec.DecodeError as error:
            raise BadJournal(f"a record can't be read: {error}") from None


def _read_record(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_RECORD_BYTES:
        raise BadJournal(f"a record of {length} bytes is over the limit of {MAX_RECORD_BYTES}")
    record = source.read(length)
    return record if len(record) == length else None
