"""What the core was told and what it said, as bytes; and the same once more, to compare.

    journal = "halfmoon journal 1\\n" | record of Header | record of Entry | …
    record  = u32 little-endian length | MessagePack

The core has no clock and no dice, so that a fresh one which is told the same at the same times
says the same. Where it does not, somebody changed how it decides: since this file was written,
or by what is not in the events.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from halfmoon_scheduling.commands import AnyCommand
from halfmoon_scheduling.conductor.conductor_machine import Conductor
from halfmoon_scheduling.config import SchedulingConfig
from halfmoon_scheduling.events import AnyEvent

MAGIC = b"halfmoon journal 1\n"
#: A longer record is no record: a prompt of a million tokens fits.
MAX_RECORD_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


class BadJournal(ValueError):
    """Not a journal of this version; the text says what it is instead."""


class JournalHeader(msgspec.Struct, frozen=True):
    """How the core that speaks here was set up."""

    config: SchedulingConfig


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """One call of `Conductor.handle`."""

    now: float
    event: AnyEvent
    commands: tuple[AnyCommand, ...]


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first entry at which a replay said something else."""

    #: Counts entries from 0.
    number: int
    entry: JournalEntry
    said: tuple[AnyCommand, ...]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(JournalHeader)
_entry_decoder = msgspec.msgpack.Decoder(JournalEntry)


def encode_header(config: SchedulingConfig) -> bytes:
    """The beginning of a journal."""
    return MAGIC + _record(JournalHeader(config))


def encode_entry(now: float, event: AnyEvent, commands: list[AnyCommand]) -> bytes:
    """One further record."""
    return _record(JournalEntry(now, event, tuple(commands)))


def read_journal(source: BinaryIO) -> tuple[JournalHeader, Iterator[JournalEntry]]:
    """A journal's header, and its entries as they are asked for.

    A record that is cut off ends the journal: whoever wrote it was killed.

    Raises:
        BadJournal: it does not begin as one; or, from the iterator, a record is not one.
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
    """Tell a fresh core the same: how many entries agreed, and the first that did not.

    Raises:
        BadJournal: as `read`.
    """
    header, entries = read_journal(source)
    core = Conductor(header.config)
    number = 0
    for number, entry in enumerate(entries, start=1):
        said = tuple(core.handle(entry.event, entry.now))
        if said != entry.commands:
            return number - 1, ReplayDifference(number - 1, entry, said)
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
