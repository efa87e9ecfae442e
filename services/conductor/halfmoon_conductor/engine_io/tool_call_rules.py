"""Define which tool calls an answer may have."""

from typing import Literal

import msgspec

ToolCallFormat = Literal["hermes", "llama3_json"]


#: Where calls may be: anywhere, as the model likes (free); anywhere, as a grammar has them
#: (exact); so too, and only in an answer that begins with one (first); they are all that the
#: answer is (only).
ToolCallPlace = Literal["free", "exact", "first", "only"]


class ToolCallRules(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that one answer may have."""

    parser: ToolCallFormat
    #: Functions that may be called.
    names: tuple[str, ...] = ()
    #: Calls at the most; later ones are dropped.
    most: int
    place: ToolCallPlace = "free"
