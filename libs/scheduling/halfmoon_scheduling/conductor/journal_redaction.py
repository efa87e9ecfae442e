"""Replace what a prompt and its answer say before an entry goes to a journal.

No decision depends on the value of a token, only on how many there are and on block hashes. So a
redacted journal replays to the same commands, redacted.
"""

from functools import cache
from typing import TypeVar

import msgspec

#: Fields that hold tokens of a prompt or an answer, of events, commands and messages alike.
_SEQUENCES = frozenset({"token_ids", "history", "tail"})
_TOKENS = frozenset({"token", "first_token"})
#: Scores name the likeliest tokens.
_SCORES = {"score": None, "prompt_scores": ()}
#: A grammar may quote what a client expects. Whether there is one counts, as `needs_history`.
_GRAMMAR = "redacted"

EntryT = TypeVar("EntryT", bound=msgspec.Struct)


def redact(entry: EntryT) -> EntryT:
    """Return an event, a command or a part of one with zeros for tokens, and without scores."""
    changes = {}
    for name in _field_names(type(entry)):
        value = getattr(entry, name)
        redacted = _redacted(name, value)
        if redacted is not value:
            changes[name] = redacted
    return msgspec.structs.replace(entry, **changes) if changes else entry


def _redacted(name: str, value: object) -> object:
    if not value:
        return value
    if isinstance(value, msgspec.Struct):
        return _SCORES[name] if name in _SCORES else redact(value)
    if isinstance(value, tuple):
        if name in _SEQUENCES:
            return (0,) * len(value)
        if name in _SCORES:
            return _SCORES[name]
        if isinstance(value[0], msgspec.Struct):
            return tuple([redact(each) for each in value])
    if name in _TOKENS:
        return 0
    return _GRAMMAR if name == "grammar" else value


@cache
def _field_names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__
