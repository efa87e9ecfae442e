"""Define how models write tool calls.

*hermes* (Qwen too): ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them,
anywhere. *llama3_json*: the whole answer is ``{"name": …, "parameters": {…}}``.
"""

from halfmoon_conductor.engine_io.tool_call_rules import ToolCallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def tool_call_format_of(template: str) -> ToolCallFormat | None:
    """Return the format that a model with this chat template has learned; None: no tools."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None
