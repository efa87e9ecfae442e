"""Define which tool calls an answer may have."""

from typing import Literal

import msgspec

ToolCallFormat = Literal["hermes", "llama3_json"]


#: Where calls may be. "free": anywhere, as the model likes. "exact": anywhere, as a grammar writes
#: them. "first": as "exact", and only in an answer that begins with one. "only": the answer is
#: nothing but calls.
ToolCallPlace = Literal["free", "exact", "first", "only"]


class ToolCallRules(msgspec.Struct, frozen=True, kw_only=True):
    """The tool calls that one answer may have."""

    format: ToolCallFormat
    #: Names of the functions that may be called.
    names: tuple[str, ...] = ()
    #: Most calls; later ones are dropped.
    max_calls: int
    place: ToolCallPlace = "free"
