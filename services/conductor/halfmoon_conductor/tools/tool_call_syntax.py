"""How models write that they call a tool.

*hermes* (Qwen too): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of
them, anywhere. *llama3_json*: the whole answer is ``{"name": …, "parameters": {…}}``.
"""

from typing import Literal

import msgspec

ToolCallFormat = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
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


def tool_call_format_of(template: str) -> ToolCallFormat | None:
    """What a model whose chat template this is has learned to write; None: no tools."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None
